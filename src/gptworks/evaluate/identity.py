"""What a result was measured with: hashes that tell two files, models or datasets apart."""

import hashlib
from pathlib import Path

from gptworks.checkpoint.pretrained import Pretrained
from gptworks.data.store import Store, sha256_of


def of_weights(opened: Pretrained) -> str:
    """sha256 of the weight file; of several, sha256 of their names and hashes. Read in full: about a second per GB.

    The same weights in another container or another precision have another hash: it names files, not numbers.
    """
    return _of_files(sorted(opened.files))


def of_stores(stores: list[Store]) -> str:
    """From the hashes in their sidecars, or from their index: the tokens themselves may be many gigabytes."""
    names = [store.identity for store in stores]
    return names[0] if len(names) == 1 else hashlib.sha256("\n".join(names).encode()).hexdigest()


def _of_files(files: list[Path]) -> str:
    hashes = [sha256_of(file) for file in files]
    if len(files) == 1:
        return hashes[0]
    lines = "".join(f"{file.name} {digest}\n" for file, digest in zip(files, hashes, strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()
