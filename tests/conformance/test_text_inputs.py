"""What goes into `prepare`, as others' preprocessing takes it. Rows of the conformance list: S1-01, S2-02."""

import io
import json
import lzma
import tarfile
from itertools import pairwise
from pathlib import Path

import pytest

from gptworks.data.store import Store

TEXTS = [f"Document {n}. It has words,\nlines and 中文。" for n in range(12)]


def tar(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def lines(texts: list[str], key: str = "text") -> bytes:
    return "".join(json.dumps({key: text, "meta": {}}, ensure_ascii=False) + "\n" for text in texts).encode()


def documents_of(prefix: Path) -> list[str]:
    """By the rules of Megatron's pair, through our store; each ends with the end of document."""
    store = Store(prefix)
    tokenizer = store.load_tokenizer()
    starts = store.document_starts
    assert all(store.tokens[end - 1] == tokenizer.eod_id for end in starts[1:])
    return [tokenizer.decode(store.tokens[begin : end - 1]) for begin, end in pairwise(starts)]


@pytest.mark.slow
def test_s1_01_archives_of_text_files_and_arrays_go_in(tmp_path: Path, run_cli) -> None:
    three = [TEXTS[0:3], TEXTS[3:6], TEXTS[6:9], TEXTS[9:12]]
    plain = {f"{n:02}.txt": text.encode() for n, text in enumerate(three[0])}
    (tmp_path / "one.xz").write_bytes(lzma.compress("".join(three[1]).encode()))
    nested = {f"urlsf_subset{n:02}.xz": b"" for n in range(3)}
    for name, text in zip(nested, three[2], strict=True):
        inner = tar(tmp_path / "inner", {name.replace(".xz", ".txt"): text.encode()}, "w:xz")
        nested[name] = inner.read_bytes()
    (tmp_path / "array.json").write_text(json.dumps([{"text": text} for text in three[3]], indent=2))
    inputs = [
        tar(tmp_path / "a.tar", plain),
        tmp_path / "one.xz",
        tar(tmp_path / "openwebtext.tar.xz", nested, "w:xz"),
        tmp_path / "array.json",
    ]
    run_cli("prepare", *inputs, "--out", tmp_path / "corpus_text_document", "--append-eod", "--doc-separator", "")
    assert {path.suffix for path in tmp_path.glob("corpus_text_document.*")} == {".bin", ".idx", ".json"}
    assert documents_of(tmp_path / "corpus_text_document") == [*three[0], "".join(three[1]), *three[2], *three[3]]


def test_s2_02_lines_zst_tars_of_zst_folders_and_workers(tmp_path: Path, run_cli) -> None:
    zstandard = pytest.importorskip("zstandard")
    folder = tmp_path / "in"
    (folder / "deeper").mkdir(parents=True)
    (folder / "1.jsonl").write_bytes(lines(TEXTS[0:4], "content"))
    (folder / "2.jsonl.zst").write_bytes(zstandard.compress(lines(TEXTS[4:8], "content")))
    shards = {f"{n}.jsonl.zst": zstandard.compress(lines([text], "content")) for n, text in enumerate(TEXTS[8:12])}
    tar(folder / "deeper" / "shards.jsonl.zst.tar", shards)
    for workers in ("1", "2"):
        out = tmp_path / workers / "corpus"
        options = ("--out", out, "--append-eod", "--key", "content", "--workers", workers)
        run_cli("prepare", folder, *options, "--json")
        assert documents_of(out) == TEXTS
    for suffix in (".bin", ".idx", ".json"):
        one, two = (tmp_path / workers / f"corpus{suffix}" for workers in ("1", "2"))
        assert one.read_bytes() == two.read_bytes()
