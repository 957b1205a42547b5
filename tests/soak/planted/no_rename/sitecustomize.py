"""A fault to be found: a folder gets its name by being copied, file by file, instead of in one go."""

import os
import shutil
from pathlib import Path

_rename = os.rename


def _copied(source, destination, **options):
    if not Path(source).is_dir():
        return _rename(source, destination, **options)
    shutil.copytree(source, destination)
    return shutil.rmtree(source)


os.rename = _copied
