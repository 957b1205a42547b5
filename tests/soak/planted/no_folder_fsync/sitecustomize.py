"""A fault to be found: files are synced, folders are not, so that names may be lost."""

import os
import stat

_fsync = os.fsync


def _files_only(descriptor):
    number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
    if not stat.S_ISDIR(os.fstat(number).st_mode):
        _fsync(number)


os.fsync = os.fdatasync = _files_only
