"""A dataset appears under its name only when it is whole: staged in a folder beside, renamed, the sidecar last.

From before the first rename until the last, the sidecar says that it is unfinished: nobody takes a mixture of old
and new files for a dataset, whenever the process or the power ends.
"""

from dataclasses import replace
from pathlib import Path

from gptworks.data.formats import registry
from gptworks.data.formats.contents import Contents
from gptworks.data.formats.registry import Format
from gptworks.data.store import Sidecar, sha256_of
from gptworks.durable import sync
from gptworks.errors import DataError
from gptworks.tokenizer import Tokenizer

# What people append to a prefix, because the files end so.
_ENDINGS = (".bin", ".idx", "_ids.npy", "_idx.npz", "_ids.npz", ".mindrecord", ".npz")


def output_prefix(prefix: str | Path) -> Path:
    """The prefix that --out or DST means."""
    name = Path(prefix).name
    ending = next((ending for ending in _ENDINGS if name.endswith(ending) and name != ending), "")
    if not name or str(prefix).endswith(("/", "\\")):
        raise DataError(f"--out: {str(prefix)!r} has no name. Needed: a prefix such as data/corpus.")
    return Path(prefix).with_name(name.removesuffix(ending))


def check_row_length(format_: Format, row_length: int | None, option: str) -> None:
    if row_length is None:
        return
    if row_length < 2:
        raise DataError(f"--row-length: got {row_length}; needs 2 or more (an input and its target).")
    if not format_.NEEDS_ROWS:
        raise DataError(
            f"--row-length: {option} {format_.NAME} has no rows; training cuts its windows by data.seq_len."
        )


def describe(tokenizer: Tokenizer, *, kind: str, eod_appended: bool) -> Sidecar:
    """What a new store says of itself; counts and hashes are filled in when it is published."""
    return Sidecar(
        kind=kind,
        tokenizer="",
        tokenizer_identity=tokenizer.identity,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        eod_appended=eod_appended,
        documents=0,
        tokens=0,
        dtype="",
    )


def publish(
    written: list[Path],
    hashes: dict[Path, str],
    contents: Contents,
    prefix: Path,
    format_: Format,
    sidecar: Sidecar | None,
    tokenizer: Tokenizer | None,
    notes: list[str],
) -> list[Path]:
    """Move the files of a dataset from their staging folder to PREFIX, with sidecar and tokenizer. Returns them all.

    `hashes`: those that are known already. Without `sidecar` nothing is known of the tokens, and none is written.
    """
    staged = written[0].parent / prefix.name
    beside: list[Path] = []
    sidecars: list[Path] = []
    if sidecar is not None:
        if tokenizer is not None:
            name = "gpt2" if tokenizer.name == "gpt2" else prefix.name + tokenizer.file_suffix
            if name != "gpt2":
                beside.append(staged.with_name(name))
                tokenizer.save_file(beside[0])
            sidecar = replace(sidecar, tokenizer=name, special={} if name == "gpt2" else tokenizer.special.as_dict())
        hashes = {file: hashes.get(file) or sha256_of(file) for file in written}
        mains = registry.mains(format_, written)
        for main in mains:
            back = format_.read(main)
            described = replace(
                sidecar,
                data_format=format_.NAME,
                documents=back.num_documents if back.has_documents or len(mains) > 1 else contents.num_documents,
                tokens=back.num_tokens,
                dtype=back.tokens.dtype.name,
                sha256={file.name.removeprefix(prefix.name): hashes[file] for file in format_.files(main)},
            )
            described.write(format_.sidecar(main))
            sidecars.append(format_.sidecar(main))
            described.write_unfinished(_unfinished(sidecars[-1]))
    files = [*written, *beside, *sidecars]
    for file in [*files, *map(_unfinished, sidecars)]:
        sync(file)
    final = [prefix.with_name(file.name) for file in files]
    if any(file.exists() for file in final[: len(written)]):
        notes.append(f"replaced the dataset that was at {prefix}")
    for file in sidecars:
        _unfinished(file).replace(prefix.with_name(file.name))
    sync(prefix.parent)
    for stale in registry.replaced_by(format_, final, prefix):
        stale.unlink()
    # The index before the tokens: tokens alone would be taken for a dataset without an index.
    for file in [*reversed(written), *beside]:
        file.replace(prefix.with_name(file.name))
    sync(prefix.parent)
    for file in sidecars:
        file.replace(prefix.with_name(file.name))
    sync(prefix.parent)
    return final


def _unfinished(sidecar: Path) -> Path:
    return sidecar.with_name(f"{sidecar.name}.unfinished")
