"""How much one file may ask for before it is refused. Each limit is far above what real files need, and can be raised.

A limit is raised by an environment variable, so that it holds in every process of a command and in Python alike:
GPTWORKS_MAX_YAML_BYTES=8M gptworks train -c huge.yaml
"""

import os
import re
from dataclasses import dataclass

from gptworks.errors import UsageError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Limit:
    """One number, and the environment variable that replaces it."""

    name: str
    default: int
    bounded: str  # what it bounds, for the documentation
    memory: str  # that a file beyond the limit takes at most until it is refused, measured in tests/unit/test_limits.py

    @property
    def variable(self) -> str:
        return f"GPTWORKS_MAX_{self.name.upper()}"

    @property
    def value(self) -> int:
        text = os.environ.get(self.variable, "").strip()
        if not text:
            return self.default
        match = re.fullmatch(r"([0-9][0-9_]*)([KMG]?)", text.upper())
        if not match or int(match[1]) == 0:
            raise UsageError(
                f"{self.variable}: got {text!r}; needs a whole number above 0, such as {self.default} or 8M."
            )
        return int(match[1]) * _UNITS[match[2]]

    def advice(self, needed: int) -> str:
        """The last words of an error: what to set when the file is meant so."""
        return f"If that is meant, allow it with the environment variable {self.variable}={needed}."


YAML_BYTES = Limit("yaml_bytes", 1 << 20, "bytes of a YAML file", "200 MB")
YAML_VALUES = Limit("yaml_values", 100_000, "values of a YAML file, with every alias written out", "200 MB")
VOCAB_GAP = Limit("vocab_gap", 1_000_000, "ids below a vocabulary's largest that no token has", "200 MB")
TOKENIZER_BYTES = Limit("tokenizer_bytes", 128 << 20, "bytes of a tokenizer's file", "200 MB")
DOCUMENT_BYTES = Limit(
    "document_bytes", 64 << 20, "bytes of one document: a JSON line, an array's element, a row, plain text", "600 MB"
)
RUN_BYTES = Limit("run_bytes", 4 << 20, "bytes of letters, of digits, of blanks or of marks in a row in a text", "1 GB")
EXPANSION = Limit("expansion", 500, "bytes out of a compressed file for each byte in it", "600 MB")
ARCHIVE_DEPTH = Limit("archive_depth", 8, "archives and compressed files within each other", "400 MB")

LIMITS = (
    YAML_BYTES,
    YAML_VALUES,
    VOCAB_GAP,
    TOKENIZER_BYTES,
    DOCUMENT_BYTES,
    RUN_BYTES,
    EXPANSION,
    ARCHIVE_DEPTH,
)
