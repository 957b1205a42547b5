"""Text to a store of tokens, for Python programs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gptworks.errors import UsageError
from gptworks.python_words import in_python_words
from gptworks.tokenizer import Tokenizer

if TYPE_CHECKING:
    from gptworks.data.prepare import Summary


@in_python_words
def prepare(
    inputs: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: Tokenizer | str = "gpt2",
    train_tokenizer: int | str | None = None,
    key: str = "text",
    append_eod: bool = True,
    strict: bool = False,
    format: str = "megatron",
    row_length: int | None = None,
    workers: int = 1,
) -> "Summary":
    """Files, folders or archives of text to a store of tokens, as `gptworks prepare` does; `data.path` takes `out`.

    `tokenizer`: one of ours, a name or a folder. `train_tokenizer`: instead learn one from the text, of so many tokens,
    or "chars". `workers` 0: as many as there are processors.

    >>> found = gptworks.prepare("stories.jsonl", "data/stories", train_tokenizer=400)   # doctest: +SKIP
    >>> found.documents, found.tokens   # doctest: +SKIP
    """
    from gptworks.data.prepare import PrepareJob
    from gptworks.data.prepare import prepare as run
    from gptworks.data.prepare import train_tokenizer as learn
    from gptworks.data.text_blocks import TextRules

    files = [str(each) for each in ([inputs] if isinstance(inputs, str | Path) else inputs)]
    _refuse_texts(files)
    if not isinstance(key, str):
        raise UsageError(
            f"prepare: key: got {key!r}; needs one text, with commas between several columns: 'title,steps'."
        )
    rules = TextRules((key,), keep_separator=not append_eod)
    if train_tokenizer is not None:
        chosen = learn(files, train_tokenizer, rules, strict=strict, with_eod=append_eod)
    else:
        chosen = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.from_pretrained(tokenizer)
    return run(
        PrepareJob(
            files,
            out,
            chosen,
            rules=rules,
            append_eod=append_eod,
            strict=strict,
            format=format,
            row_length=row_length,
            workers=workers,
        )
    )


def _refuse_texts(files: list[str]) -> None:
    """A list of texts is taken by others; a path has one line and a length that a file system knows."""
    for number, each in enumerate(files, 1):
        if "\n" in each or len(each.encode()) > 4095:
            text = each if len(each) <= 40 else f"{each[:40]}..."
            raise UsageError(
                f"prepare: item {number} is the text {text!r}; needs paths of files or folders. Trainer and evaluate "
                "take a list of texts as it is."
            )
