"""A fault to be found: no reader has a limit."""

import os

_NAMES = (
    "YAML_BYTES",
    "YAML_VALUES",
    "VOCAB_GAP",
    "TOKENIZER_BYTES",
    "DOCUMENT_BYTES",
    "RUN_BYTES",
    "EXPANSION",
    "ARCHIVE_DEPTH",
)
os.environ.update({f"GPTWORKS_MAX_{name}": "1000G" for name in _NAMES})
