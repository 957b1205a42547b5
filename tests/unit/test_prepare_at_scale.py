"""`prepare` on much text: workers, going on after a stop, long documents, and the quick encoder."""

import errno
import gzip
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from gptworks.data import encode, prepare, text_blocks, work_folder
from gptworks.data.store import Store
from gptworks.data.text_blocks import TextRules
from gptworks.errors import DataError
from gptworks.tokenizer import Tokenizer, fast

SUFFIXES = (".bin", ".idx", ".json")
BLOCK = 3000  # the fixture corpus then has two dozen of them


def files_of(prefix: Path) -> dict[str, bytes]:
    return {suffix: prefix.with_name(prefix.name + suffix).read_bytes() for suffix in SUFFIXES}


def leftovers(prefix: Path) -> list[str]:
    return sorted(path.name for path in prefix.parent.glob(f"{prefix.name}*"))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(text_blocks, "_READ_BYTES", BLOCK // 3)


@pytest.fixture(scope="session")
def gpt2() -> Tokenizer:
    return Tokenizer.from_pretrained("gpt2")


# Workers and blocks


@pytest.mark.parametrize("rules", [TextRules(), TextRules(separator=""), TextRules(separator="", keep_separator=False)])
def test_block_sizes_do_not_change_a_byte(
    rules: TextRules, corpus_file: Path, small_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for size in (500, 3000, 7777, 1 << 22):
        monkeypatch.setattr(text_blocks, "BLOCK_BYTES", size)
        monkeypatch.setattr(text_blocks, "_READ_BYTES", size)
        prefix = tmp_path / str(size) / "out"
        prepare.prepare(
            prepare.PrepareJob(
                [str(corpus_file)], prefix, small_tokenizer, rules=rules, append_eod=not rules.keep_separator
            )
        )
        found.append(files_of(prefix))
    assert all(each == found[0] for each in found[1:])
    ids = small_tokenizer.encode(corpus_file.read_text(encoding="utf-8"))
    if not rules.separator:
        assert Store(prefix).tokens.tolist() == ids + ([] if rules.keep_separator else [small_tokenizer.eod_id])


def test_the_number_of_workers_does_not_change_a_byte(
    corpus_file: Path, small_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    lines = tmp_path / "a.jsonl"
    documents = corpus_file.read_text(encoding="utf-8").split("\n\n")
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents) + "{\n")
    summaries = []
    for workers in (1, 2):
        summaries.append(
            prepare.prepare(
                prepare.PrepareJob(
                    [str(lines), str(corpus_file), str(lines)],
                    tmp_path / str(workers) / "out",
                    small_tokenizer,
                    rules=TextRules(separator=""),
                    append_eod=True,
                    workers=workers,
                )
            )
        )
    assert files_of(tmp_path / "1" / "out") == files_of(tmp_path / "2" / "out")
    one, two = summaries
    assert (one.workers, two.workers) == (1, 2)
    assert one.skipped == two.skipped and one.skipped.count == 2
    assert all(line.startswith(f"{lines}:{len(documents) + 1}: not JSON") for line in one.skipped.first)


def test_how_many_workers() -> None:
    with pytest.raises(DataError, match="--workers: got -1; needs 1 or more, or 0 for one per processor"):
        prepare._how_many(-1, 0, [])
    assert prepare._how_many(3, 0, []) == 3
    assert prepare._how_many(0, 1000, []) == 1  # too small to gain
    assert prepare._how_many(0, 1 << 40, []) >= 1


# Going on after a stop


class Stopped(KeyboardInterrupt):
    pass


class Case:
    """One command that can be stopped and given again."""

    def __init__(self, tmp_path: Path, tokenizer: Tokenizer, source: Path) -> None:
        self.prefix, self.tokenizer, self.source = tmp_path / "out", tokenizer, source
        self.part = tmp_path / "out.part"
        self.options: dict[str, Any] = {"rules": TextRules(keep_separator=False), "append_eod": True}

    def run(self, stop_after: int = 0, prefix: Path | None = None, **options: Any) -> prepare.Summary:
        def progress(state: work_folder.State, total: int) -> None:
            if state.blocks == stop_after:
                raise Stopped

        options = {**self.options, **options}
        return prepare.prepare(
            prepare.PrepareJob([str(self.source)], prefix or self.prefix, self.tokenizer, progress=progress, **options)
        )

    def stop(self, after: int = 5, **options: Any) -> None:
        with pytest.raises(Stopped):
            self.run(after, **options)
        assert leftovers(self.prefix) == ["out.part"]
        assert len((self.part / "journal").read_bytes().splitlines()) == after

    def goes_on(self, kept: int, **options: Any) -> None:
        summary = self.run(**options)
        whole = self.run(prefix=self.prefix.parent / "whole" / "out", **options)
        assert summary.blocks_kept == kept
        assert files_of(self.prefix) == files_of(self.prefix.parent / "whole" / "out")
        assert leftovers(self.prefix) == ["out.bin", "out.idx", "out.json", "out.tokenizer.json"]
        same = ("documents", "tokens", "characters", "text_bytes", "empty", "skipped")
        assert all(getattr(summary, name) == getattr(whole, name) for name in same)


@pytest.fixture
def case(tmp_path: Path, small_tokenizer: Tokenizer, corpus_file: Path) -> Case:
    source = tmp_path / "a.jsonl"
    texts = corpus_file.read_text(encoding="utf-8").split("\n\n")
    lines = [json.dumps({"text": text}) for text in texts]
    source.write_text("\n".join(["{", *lines[:50], '{"text": ""}', "[]", *lines[50:], "{"]))
    return Case(tmp_path, small_tokenizer, source)


def test_a_stopped_run_goes_on(case: Case) -> None:
    case.stop(5)
    case.stop(9)
    case.goes_on(9)


def test_a_stopped_run_goes_on_in_the_middle_of_a_document(case: Case, corpus_file: Path) -> None:
    case.source = corpus_file
    case.options = {"rules": TextRules(separator="")}
    case.stop(5)
    case.goes_on(5)


def test_a_stop_before_the_first_new_block_loses_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.stop(5)
    with monkeypatch.context() as patch:
        patch.setattr(work_folder.WorkFolder, "skip_done", lambda *_: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            case.run()
    case.goes_on(5)


def test_a_stop_while_the_store_is_put_together_loses_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(work_folder, "publish", lambda *_: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            case.run()
    blocks = len((case.part / "journal").read_bytes().splitlines())
    assert not case.prefix.with_suffix(".bin").exists()
    case.goes_on(blocks)


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def append(file: Path, data: bytes) -> None:
    file.write_bytes(file.read_bytes() + data)


def tokens_after(case: Case, blocks: int) -> int:
    lines = (case.part / "journal").read_bytes().splitlines()
    return int(json.loads(lines[blocks - 1])["tokens"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "kept"),
    [
        (lambda case: append(case.part / "journal", b'{"blocks": 6, "tok'), 5),
        (lambda case: os.truncate(case.part / "journal", (case.part / "journal").stat().st_size - 1), 4),
        (lambda case: os.truncate(case.part / "journal", (case.part / "journal").stat().st_size - 30), 4),
        (lambda case: (case.part / "journal").write_bytes(b"\xff\x00rubbish"), 0),
        (lambda case: (case.part / "plan.json").write_text("{"), 0),
        (lambda case: (case.part / "plan.json").unlink(), 0),
        (lambda case: append(case.part / "tokens", b"half a block"), 5),
        (lambda case: append(case.part / "sizes", b"half"), 5),
        (lambda case: os.truncate(case.part / "tokens", 2 * tokens_after(case, 4) + 1), 4),
        (lambda case: flip(case.part / "tokens", 2 * tokens_after(case, 2) + 3), 2),
        (lambda case: flip(case.part / "tokens", 0), 0),
        (lambda case: (case.part / "tokens").unlink(), 0),
        (lambda case: os.truncate(case.part / "sizes", (case.part / "sizes").stat().st_size - 8), 4),
        (lambda case: flip(case.part / "sizes", 0), 0),
    ],
    ids=range(14),
)
def test_only_what_is_whole_is_kept(damage: Callable[[Case], object], kept: int, case: Case) -> None:
    case.stop(5)
    damage(case)
    case.goes_on(kept)


@pytest.mark.parametrize(
    "changed",
    [{"append_eod": False}, {"rules": TextRules(("text",), "\n")}, {"strict": False, "rules": TextRules(kind="jsonl")}],
)
def test_other_options_start_anew(changed: dict[str, Any], case: Case) -> None:
    case.stop(5)
    case.goes_on(0, **changed)


def test_another_tokenizer_starts_anew(case: Case, gpt2: Tokenizer, corpus_file: Path) -> None:
    case.stop(5)
    case.tokenizer = Tokenizer.train([corpus_file.read_text(encoding="utf-8")], 400)
    case.goes_on(0)


def test_another_input_starts_anew(case: Case) -> None:
    case.stop(5)
    case.source.write_text(case.source.read_text() + "\n")
    case.goes_on(0)


def test_compressed_text_goes_on_and_a_changed_one_starts_anew(case: Case) -> None:
    data = case.source.read_bytes()
    case.source = case.source.with_name("a.jsonl.gz")
    case.source.write_bytes(gzip.compress(data))
    case.stop(5)
    case.goes_on(5)
    case.prefix = case.prefix.parent / "second" / "out"
    case.part = case.prefix.with_name("out.part")
    case.stop(5)
    case.source.write_bytes(gzip.compress(data.replace(b"the", b"teh")))
    os.utime(case.source, (1, 1))
    case.goes_on(0)


def test_standard_input_goes_on_with_the_same_text_only(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    data = case.source.read_bytes()

    class Pipe:
        def __init__(self, data: bytes) -> None:
            self.buffer = io.BytesIO(data)

    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", Pipe(data))

    case.goes_on(0)
    expected = files_of(case.prefix)
    case.source = Path("-")
    case.prefix = case.prefix.parent / "from-stdin" / "out"
    case.part = case.prefix.with_name("out.part")
    give(data)
    case.stop(5)
    for other in (data.replace(b"the", b"teh"), data[:2000]):
        give(other)
        with pytest.raises(DataError, match=r"the text that comes now is another\. Remove that folder to start anew"):
            case.run()
        assert leftovers(case.prefix) == ["out.part"]
    give(data)
    assert case.run().blocks_kept == 5
    assert files_of(case.prefix) == expected


def test_two_at_once_are_refused(case: Case) -> None:
    def second(state: work_folder.State, total: int) -> None:
        with pytest.raises(
            DataError, match=r"another `gptworks prepare` is writing it\. Wait for it, or choose another"
        ):
            case.run()

    prepare.prepare(prepare.PrepareJob([str(case.source)], case.prefix, case.tokenizer, progress=second))
    assert Store(case.prefix).num_documents > 100


def test_a_full_disk_is_told_and_the_work_is_kept(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = work_folder._open_for_update

    class Full:
        def __init__(self, path: Path) -> None:
            self.file, self.left = opened(path), 5

        def write(self, data: bytes) -> int:
            self.left -= 1
            if self.left < 0:
                self.file.write(data[: len(data) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.file.write(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    with monkeypatch.context() as patch:
        patch.setattr(work_folder, "_open_for_update", Full)
        with pytest.raises(DataError, match=r"out\.part: No space left on device\. Free some space\. The same command"):
            case.run()
    case.goes_on(5)


def test_a_disk_that_is_full_from_the_start(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails while it writes, names no file."""

    def refuse(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(work_folder, "_open_for_update", refuse)
    with pytest.raises(DataError, match=r"out\.part: No space left on device\. Free some space\.$") as caught:
        case.run()
    assert "None" not in str(caught.value)


def test_a_folder_that_cannot_be_written(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(work_folder, "_open_for_update", refuse)
    with pytest.raises(DataError, match=r"out\.part/tokens: permission denied: "):
        case.run()
    assert not leftovers(case.prefix)


# The same with real processes and signals

CHILD = """
import json, multiprocessing, os, sys, time
from gptworks.data import text_blocks, work_folder
stop_after, how = int(sys.argv[1]), int(sys.argv[2])
text_blocks.BLOCK_BYTES, text_blocks._READ_BYTES = 20000, 5000
add = work_folder.WorkFolder.add
def count(work, *rest):
    add(work, *rest)
    if work.state.blocks == stop_after:
        print(json.dumps([each.pid for each in multiprocessing.active_children()]), flush=True)
        os.kill(os.getpid(), how)
        time.sleep(10)
work_folder.WorkFolder.add = count
from gptworks.cli.main import main
sys.exit(main(sys.argv[3:]))
"""


def command(*arguments: object, stop_after: int = 0, how: int = 0) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", CHILD, str(stop_after), str(how), "prepare", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture(scope="session")
def other_kind(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that only the reference library can encode with."""
    backend = tokenizers.Tokenizer.from_str(
        Tokenizer.train([corpus_file.read_text(encoding="utf-8")], 400).backend.to_str()
    )
    backend.normalizer = tokenizers.normalizers.NFC()
    path = tmp_path_factory.mktemp("tokenizer") / "nfc.json"
    backend.save(str(path))
    return path


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes as Linux shows them")
def test_killed_it_goes_on_with_the_same_bytes(corpus_file: Path, other_kind: Path, tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_bytes(corpus_file.read_bytes() * 5)
    options = (source, "--tokenizer", other_kind, "--append-eod", "--workers", 2)
    killed = command(*options, "--out", tmp_path / "out", stop_after=3, how=signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL
    assert leftovers(tmp_path / "out") == ["out.part"]
    workers = json.loads(killed.stdout)
    assert len(workers) == 2
    while not all(map(has_ended, workers)):
        time.sleep(0.01)
    again = command(*options, "--out", tmp_path / "out")
    assert again.returncode == 0 and "going on from an interrupted run: 3 blocks were done" in again.stderr
    assert "(tokenizers, 2 processes)" in again.stdout
    prepare.prepare(
        prepare.PrepareJob(
            [str(source)],
            tmp_path / "whole" / "out",
            Tokenizer.from_pretrained(other_kind),
            rules=TextRules(keep_separator=False),
            append_eod=True,
        )
    )
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole" / "out")


@pytest.mark.slow
def test_interrupted_it_goes_on(corpus_file: Path, tmp_path: Path) -> None:
    options = (corpus_file, "--tokenizer", "gpt2", "--workers", 1, "--out", tmp_path / "out")
    stopped = command(*options, stop_after=2, how=signal.SIGINT)
    assert (stopped.returncode, stopped.stderr) == (130, "stopped; the same command goes on from here\n")
    assert leftovers(tmp_path / "out") == ["out.part"]
    again = command(*options)
    assert again.returncode == 0 and "going on from an interrupted run: 2 blocks were done" in again.stderr


class Fragile(Tokenizer):
    """Its worker dies, once, at a text in the middle of the corpus."""

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        flag = Path(os.environ.get("GPTWORKS_TEST_FLAG", "/nonexistent"))
        if multiprocessing.parent_process() and flag.exists() and any("the end is near" in text for text in texts):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode_batch(texts)


def test_a_worker_that_dies_is_told_and_the_work_goes_on(
    other_kind: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "flag"
    flag.touch()
    monkeypatch.setenv("GPTWORKS_TEST_FLAG", str(flag))
    text = corpus_file.read_text(encoding="utf-8")
    case = Case(tmp_path, Fragile.from_pretrained(other_kind), tmp_path / "a.txt")
    case.source.write_text(text + "\n\nthe end is near\n\n" + text[:10000], encoding="utf-8")
    with pytest.raises(DataError, match="a worker process ended without a word") as caught:
        case.run(workers=2)
    assert "Use --workers 1; the same command goes on where this one stopped." in str(caught.value)
    done = len((case.part / "journal").read_bytes().splitlines())
    assert done > 5
    flag.unlink()
    case.goes_on(done)


# Long documents

MEASURE = """
import sys
from pathlib import Path
from gptworks.data import prepare
from gptworks.data.text_blocks import TextRules
from gptworks.tokenizer import Tokenizer
tokenizer, rules = Tokenizer.from_pretrained("gpt2"), TextRules(separator="")
summary = prepare.prepare(prepare.PrepareJob([sys.argv[1]], sys.argv[2], tokenizer, rules=rules))
assert summary.documents == 1
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(peak.split()[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the peak memory")
def test_memory_does_not_grow_with_a_document(corpus_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("gigatoken")
    peaks = []
    for megabytes in (6, 30):
        source = tmp_path / f"{megabytes}.txt"
        text = corpus_file.read_bytes()
        source.write_bytes(text * (megabytes * 10**6 // len(text)))
        line = [sys.executable, "-c", MEASURE, str(source), str(tmp_path / "out")]
        peaks.append(int(subprocess.run(line, capture_output=True, text=True, check=True).stdout))
    assert peaks[1] < 1.25 * peaks[0], f"peak memory in kB: {peaks}"


@pytest.mark.slow
@pytest.mark.parametrize("may_be_quick", [True, False])
def test_a_long_document_has_the_ids_of_the_whole(
    may_be_quick: bool, corpus_file: Path, gpt2: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "_PIECE_BYTES", 1000)
    if not may_be_quick:
        monkeypatch.setattr(encode, "fast_encoder", lambda tokenizer: None)
    text = corpus_file.read_text(encoding="utf-8") * 3
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    summary = prepare.prepare(
        prepare.PrepareJob([str(tmp_path / "a.txt")], tmp_path / "out", gpt2, rules=TextRules(separator=""))
    )
    assert (summary.documents, summary.text_bytes) == (1, len(text.encode()))
    assert Store(tmp_path / "out").tokens.tolist() == gpt2.encode(text)


# The quick encoder


@pytest.fixture(scope="session")
def tiny_megatron(shared_data: Path) -> Tokenizer:
    folder = shared_data / "vocab" / "gpt2-tiny-megatron"
    return Tokenizer.from_files(folder / "gpt2-tiny-vocab.json", folder / "gpt2-tiny-merges.txt")


@pytest.fixture
def pairs(small_tokenizer: Tokenizer, gpt2: Tokenizer) -> list[tuple[fast.FastEncoder, Tokenizer]]:
    pytest.importorskip("gigatoken")
    found = [(fast.fast_encoder(each), each) for each in (gpt2, small_tokenizer)]
    assert all(encoder is not None for encoder, _ in found)
    return found  # type: ignore[return-value]


def assert_same(encoder: fast.FastEncoder, tokenizer: Tokenizer, texts: list[str]) -> None:
    tokens, sizes = encoder.encode([text.encode() for text in texts])
    expected = tokenizer.encode_batch(texts)
    if sizes.tolist() != [len(ids) for ids in expected] or tokens.tolist() != [i for ids in expected for i in ids]:
        ends = np.cumsum(sizes)
        for text, ids, end, size in zip(texts, expected, ends, sizes, strict=True):
            assert tokens[end - size : end].tolist() == ids, repr(text[:200])
        raise AssertionError("sizes differ")


def test_quick_ids_of_tricky_text_and_of_the_corpus(pairs, corpus_file: Path) -> None:
    text = corpus_file.read_text(encoding="utf-8")
    for encoder, tokenizer in pairs:
        assert_same(encoder, tokenizer, [fast.TRICKY, text, "", *text.split("\n\n"), fast.TRICKY[::-1]])


@pytest.mark.slow
def test_quick_ids_of_any_text(pairs) -> None:
    @settings(max_examples=4 * settings().max_examples)
    @given(st.lists(st.text(max_size=30) | st.text("ab'sS \n\t1.é中\u0301<|endoftext|>", max_size=40), max_size=5))
    def same(texts: list[str]) -> None:
        for encoder, tokenizer in pairs:
            assert_same(encoder, tokenizer, [*texts, "end"])

    same()


@pytest.mark.slow
def test_quick_ids_of_every_character(pairs) -> None:
    """Alone, doubled, and between letters, digits, spaces and marks."""
    every = [c for c in map(chr, range(0x110000)) if unicodedata.category(c) not in ("Cs", "Cn", "Co")]
    rare = [c for c in map(chr, range(0x378, 0x110000, 997)) if unicodedata.category(c) in ("Cn", "Co")]
    (quick, gpt2), (other, small) = pairs
    groups = [every[at : at + 64] for at in range(0, len(every), 64)] + [rare]
    texts = ["".join(f"{c} a{c}b1{c}2 {c}{c}.{c}\n{c}" for c in group) for group in groups]
    assert_same(quick, gpt2, texts)
    assert_same(other, small, texts[::7])


@pytest.mark.slow
def test_quick_ids_of_real_corpora(shared_data: Path, pairs, tiny_megatron: Tokenizer) -> None:
    corpora = shared_data / "corpora"
    lines = (corpora / "openwebtext-1000" / "openwebtext-1000.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    texts += [path.read_text(encoding="utf-8") for path in sorted((corpora / "zh").iterdir())]
    with gzip.open(corpora / "enwik8" / "enwik8.gz") as file:
        texts.append(file.read(1 << 20).decode(errors="ignore"))
    texts.append((corpora / "wikitext-2" / "wiki.test.raw").read_text(encoding="utf-8"))
    tiny = fast.fast_encoder(tiny_megatron)
    assert tiny is not None
    assert_same(*pairs[0], texts)
    assert_same(*pairs[1], texts[::5])
    assert_same(tiny, tiny_megatron, texts[::5])


@pytest.mark.parametrize("lie", ["wrong id", "panic"])
def test_a_lying_encoder_is_found_and_the_reference_encodes_all(
    lie: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gigatoken")
    folder = case.source.with_name("folder")
    folder.mkdir()
    (folder / "picture.png").touch()
    lines = case.source.read_text().splitlines()
    text = json.dumps({"text": "a strange ‽ text " * 300})
    (folder / "a.jsonl").write_text("\n".join([*lines, text, *lines[:50]]))
    case.source = folder
    with monkeypatch.context() as patch:
        patch.setattr(encode, "fast_encoder", lambda tokenizer: None)
        expected = case.run(prefix=case.prefix.parent / "whole" / "out")
    honest = fast.FastEncoder.encode

    def dishonest(self: fast.FastEncoder, given: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        tokens, sizes = honest(self, given)
        if any("‽".encode() in text for text in given):
            if lie == "panic":
                raise BaseException("what a panic of a library in Rust is in Python")
            tokens = tokens ^ 1
        return tokens, sizes

    monkeypatch.setattr(fast.FastEncoder, "encode", dishonest)
    summary = case.run()
    assert "gigatoken failed on, or gives other ids than tokenizers for, " in summary.notes[0]
    assert summary.encoder == expected.encoder == "tokenizers"
    assert summary.skipped == expected.skipped and summary.skipped.passed_over == [str(folder / "picture.png")]
    assert files_of(case.prefix) == files_of(case.prefix.parent / "whole" / "out")


def test_a_pipe_cannot_be_encoded_again(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is half read when the disagreement is found: no store of the other half."""
    pytest.importorskip("gigatoken")
    data = case.source.read_bytes() + b"\n" + json.dumps({"text": "a strange ‽ text " * 300}).encode()

    class Pipe:
        buffer = io.BytesIO(data)

    monkeypatch.setattr(sys, "stdin", Pipe)
    honest = fast.FastEncoder.encode

    def dishonest(self: fast.FastEncoder, given: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        tokens, sizes = honest(self, given)
        return (tokens ^ 1 if any("‽".encode() in text for text in given) else tokens), sizes

    monkeypatch.setattr(fast.FastEncoder, "encode", dishonest)
    case.source = Path("-")
    with pytest.raises(DataError, match=r"cannot be read again\. Send it once more with --encoder tokenizers"):
        case.run()
    assert leftovers(case.prefix) == []


def test_the_reference_goes_on_with_what_it_began(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(encode, "fast_encoder", lambda tokenizer: None)
        case.stop(5)
    summary = case.run()
    assert (summary.encoder, summary.blocks_kept) == ("tokenizers", 5)


def with_change(tokenizer: Tokenizer, change: Callable[[dict[str, Any]], object]) -> Tokenizer:
    spec = json.loads(tokenizer.backend.to_str())
    change(spec)
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec)), name="changed")


def added(content: str, **flags: bool) -> Callable[[dict[str, Any]], object]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return lambda spec: spec["added_tokens"].append({"id": 512, "content": content, **plain, **flags})


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec.update(normalizer={"type": "NFC"}),
        lambda spec: spec["pre_tokenizer"].update(add_prefix_space=True),
        lambda spec: spec["pre_tokenizer"].update(use_regex=False),
        lambda spec: spec.update(pre_tokenizer={"type": "Whitespace"}),
        lambda spec: spec.update(pre_tokenizer=None),
        lambda spec: spec["model"].update(dropout=0.5),
        lambda spec: spec["model"].update(ignore_merges=True),
        added("<mask>", lstrip=True),
        added("<mask>", rstrip=True),
        added("<mask>", single_word=True),
        added("two words"),
        added("。中"),
    ],
    ids=range(12),
)
def test_tokenizers_of_other_kinds_do_not_take_the_quick_way(
    change: Callable[[dict[str, Any]], object], small_tokenizer: Tokenizer
) -> None:
    assert fast.is_plain_byte_level(small_tokenizer)
    other = with_change(small_tokenizer, change)
    assert not fast.is_plain_byte_level(other) and fast.fast_encoder(other) is None


def test_wordpiece_does_not_take_the_quick_way() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    assert fast.fast_encoder(Tokenizer(backend, name="wordpiece")) is None


def test_an_added_token_that_is_plain_takes_the_quick_way(small_tokenizer: Tokenizer) -> None:
    pytest.importorskip("gigatoken")
    other = with_change(small_tokenizer, added("<mask>"))
    encoder = fast.fast_encoder(other)
    assert encoder is not None
    assert_same(encoder, other, ["a<mask>b <mask><|endoftext|> <mas", "<mask>"])


def test_without_gigatoken_all_works(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.run(prefix=case.prefix.parent / "whole" / "out")
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    assert fast.fast_encoder(case.tokenizer) is None
    assert case.run().encoder == "tokenizers"
    assert files_of(case.prefix) == files_of(case.prefix.parent / "whole" / "out")


# Formats


@pytest.mark.slow
def test_formats_that_do_not_fit(corpus_file: Path, tmp_path: Path, small_tokenizer: Tokenizer, run_cli) -> None:
    (tmp_path / "v.json").write_text(json.dumps({"a": 0, "b": 70_000}))
    (tmp_path / "m.txt").write_text("")
    wide = Tokenizer.from_files(tmp_path / "v.json", tmp_path / "m.txt")
    refused: list[tuple[Tokenizer, dict[str, Any], str]] = [
        (small_tokenizer, {"format": "mindrecord"}, "--format mindrecord: its rows are training samples"),
        (small_tokenizer, {"row_length": 1}, "--row-length: got 1; needs 2 or more"),
        (small_tokenizer, {"row_length": 9}, "--row-length: --format megatron has no rows"),
        (small_tokenizer, {"format": "parrot"}, "--format: no format 'parrot'. Formats: megatron"),
        (wide, {"format": "nanogpt"}, "--format nanogpt: stores ids up to 65535, but .* has 70001 tokens"),
        (wide, {"format": "llmc"}, "--format llmc: stores ids up to 65535"),
        (
            small_tokenizer,
            {"format": "nanogpt", "rules": TextRules(("q", "a")), "append_eod": True},
            "--format nanogpt: prompts and completions are kept in a megatron store only",
        ),
    ]
    for tokenizer, options, expected in refused:
        with pytest.raises(DataError, match=expected):
            prepare.prepare(prepare.PrepareJob([str(corpus_file)], tmp_path / "out", tokenizer, **options))
    failed = run_cli("prepare", corpus_file, "--out", tmp_path / "out", "--format", "parrot", expect=2)
    assert failed.stderr.startswith("error: --format: no format 'parrot'. Formats: megatron")
    assert not leftovers(tmp_path / "out")


def test_rows_of_one_length(case: Case) -> None:
    case.run()
    stream = Store(case.prefix).tokens.tolist()
    in_rows = {"format": "mindrecord", "prefix": case.prefix.parent / "rows"}
    case.run(row_length=100, **in_rows)
    rows = Store(in_rows["prefix"])
    assert rows.tokens[:].tolist() == stream[: len(stream) // 100 * 100]
    assert set(np.diff(rows.document_starts)) == {100}
    with pytest.raises(DataError, match=r"tokens do not fill one row of 10000000\. Use more text"):
        case.run(row_length=10_000_000, format="mindrecord", prefix=case.prefix.parent / "second")
    assert not leftovers(case.prefix.parent / "second")


@pytest.mark.slow
def test_several_keys_give_several_stores(tmp_path: Path, run_cli) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({"title": "A title", "body": "Some body"}) + "\n")
    done = run_cli("prepare", source, "--out", tmp_path / "out", "--key", "title", "--key", "body")
    assert [line.split(":")[0] for line in done.stdout.splitlines() if ".bin:" in line] == [
        str(tmp_path / "out_title.bin"),
        str(tmp_path / "out_body.bin"),
    ]
    for key, text in (("title", "A title"), ("body", "Some body")):
        store = Store(tmp_path / f"out_{key}")
        assert store.load_tokenizer().decode(store.tokens) == text
    refused = run_cli("prepare", "-", "--out", tmp_path / "x", "--key", "a", "--key", "b", expect=2)
    assert refused.stderr.startswith("error: - (standard input) can be read only once, but --key given twice needs")
