"""A fault to be found: a byte of the weights is another one by the time they get their name."""

import os
from pathlib import Path

_rename = os.rename


def _flipped(source, destination, **options):
    for file in Path(source).rglob("model.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    return _rename(source, destination, **options)


os.rename = _flipped
