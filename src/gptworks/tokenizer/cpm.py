"""CPM's rules, which Chinese GPTs add to sentencepiece: words are cut by jieba, spaces and line ends become pieces.

The text is cut into words; in them a space becomes U+2582 and a line end U+2583, pieces of the vocabulary; the words
are joined by single spaces, which tell sentencepiece where a word begins and mean nothing afterwards.
"""

import hashlib
import io
import warnings
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from pathlib import Path

from gptworks.errors import TokenizerError

SPACE, LINE_END, EOD = "\u2582", "\u2583", "<eod>"
_TO_PIECES = str.maketrans(" \n", SPACE + LINE_END)
_FROM_PIECES = str.maketrans({" ": "", SPACE: " ", LINE_END: "\n"})

# The words decide the ids: another dictionary is another tokenizer.
_JIEBA = "jieba==0.42.1"
_DICTIONARY_SHA256 = "7197c3211ddd98962b036cdf40324d1ea2bfaa12bd028e68faa70111a88e12a8"


def are_rules_of(pieces: Collection[str]) -> bool:
    """A model was trained for these rules if its vocabulary has their pieces."""
    return all(piece in pieces for piece in (SPACE, LINE_END, EOD))


def to_words(text: str) -> str:
    """What sentencepiece gets to see."""
    return " ".join(word.translate(_TO_PIECES) for word in _cutter()(text))


def from_words(text: str) -> str:
    """The text again: all that sentencepiece and the rules leave of it."""
    return text.translate(_FROM_PIECES)


@lru_cache(maxsize=1)
def _cutter() -> Callable[[str], Iterable[str]]:
    """jieba's exact mode with its own dictionary, whatever words the process added to its global one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pkg_resources, and escapes that newer Pythons dislike
            import jieba
    except ImportError:
        raise TokenizerError(
            "this sentencepiece model has CPM's rules, which cut words with jieba: it is not installed. "
            'Install it: pip install "gptworks[interop]"'
        ) from None
    file = Path(jieba.__file__).with_name("dict.txt")
    content = file.read_bytes() if file.is_file() else b""
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != _DICTIONARY_SHA256:
        raise TokenizerError(
            f"{file}: sha256 {sha256[:12]}..., needed {_DICTIONARY_SHA256[:12]}...: with other words the ids would be "
            f"others. Install the version that CPM's ids are known for: pip install --force-reinstall {_JIEBA}"
        )
    # Not jieba's own start: it trusts a cache that anybody may have put into the folder for temporary files.
    cutter = jieba.Tokenizer()
    cutter.FREQ, cutter.total = cutter.gen_pfdict(io.BytesIO(content))
    cutter.initialized = True
    return cutter.cut
