"""A fault to be found: folders are synced, files are not."""

import os
import stat

_fsync = os.fsync


def _folders_only(descriptor):
    number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
    if stat.S_ISDIR(os.fstat(number).st_mode):
        _fsync(number)


os.fsync = os.fdatasync = _folders_only
