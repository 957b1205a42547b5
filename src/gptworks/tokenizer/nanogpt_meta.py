"""nanoGPT's meta.pkl: which character has which id in the train.bin and val.bin beside it.

A pickle is a program. This one is read by our own machine, which calls nothing that it names.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptworks.errors import CheckpointError, TokenizerError
from gptworks.pickle_values import brief
from gptworks.safe_pickle import PickleMachine
from gptworks.tokenizer.characters import CharacterTokenizer

NAME = "meta.pkl"
_MOST_BYTES = 64 * 1024**2  # all of Unicode takes less
_NEEDED = (
    "Needed: what nanoGPT's prepare.py writes, {'vocab_size': N, 'itos': {id: character}, 'stoi': {character: id}}"
)


@dataclass(frozen=True)
class Meta:
    vocab_size: int
    ids: dict[str, int]  # of each character; empty where the file has only the size


def read(path: Path) -> Meta:
    """What the file says, checked."""

    def broken(problem: str) -> TokenizerError:
        return TokenizerError(f"{path}: {problem}. {_NEEDED}.")

    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise broken(f"{size:,} bytes, more than any table of characters has")
    try:
        content = PickleMachine(memoryview(path.read_bytes()), str(path)).load()
    except CheckpointError as error:
        raise TokenizerError(f"{error} {_NEEDED}.") from None
    if not isinstance(content, dict):
        raise broken(f"holds {brief(content)}")
    vocab_size, ids = content.get("vocab_size"), content.get("stoi")
    if ids is None:
        if not isinstance(vocab_size, int) or isinstance(vocab_size, bool) or vocab_size < 1:
            raise broken(f"vocab_size is {brief(vocab_size)}")
        return Meta(vocab_size, {})
    if not isinstance(ids, dict) or not ids:
        raise broken(f"stoi is {brief(ids)}")
    for token, i in ids.items():
        if not isinstance(token, str) or len(token) != 1 or not _is_id(i):
            raise broken(f"stoi has {brief(token)}: {brief(i)}, where a character and its id belong")
    if sorted(ids.values()) != list(range(len(ids))) or vocab_size not in (None, len(ids)):
        raise broken(
            f"stoi has {len(ids)} characters with ids up to {max(ids.values())}, and vocab_size is {brief(vocab_size)}"
        )
    letters = content.get("itos")
    backwards = dict(enumerate(letters)) if isinstance(letters, list) else letters
    if backwards is not None and backwards != {i: token for token, i in ids.items()}:
        raise broken("itos and stoi disagree")
    return Meta(len(ids), ids)


def find(folder: Path) -> Path | None:
    """The file of a folder, if it is there."""
    return folder / NAME if (folder / NAME).is_file() else None


def read_tokenizer(path: Path) -> CharacterTokenizer:
    """The tokenizer of the file."""
    ids = read(path).ids
    if not ids:
        raise TokenizerError(f"{path}: has a vocab_size, but not which character has which id. {_NEEDED}.")
    return CharacterTokenizer.from_ids(ids, name=str(path))


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
