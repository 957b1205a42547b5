"""Claim: `gptworks prepare` turns JSON lines on disk into a store on disk faster than the libraries people use for it.

    python benchmarks/prepare.py [--megabytes 120] [--rounds 3] [--processes 1 2] [--only NAME ...] [--where] [--memory]

Competitors, each with a plain writer (all ids to one file, lengths to another), each in a process of its own:
  tokenizers   Hugging Face, encode_batch_fast on batches of 1,000 documents
  tiktoken     encode_ordinary_batch on batches of 1,000 documents
  gigatoken    its own reader of JSON lines, the whole file at once
  ours         gptworks prepare
  ours, HF     the same without the quick library
They take turns; every one must give the same ids. Seconds are those of the whole process, from its start to its end;
`work` leaves out starting Python and loading the vocabulary. Two processes means two threads for the libraries.
The text is real (../shared/data: Wikipedia, web pages, WikiText) when it is there, else what Python carries.

--where   what the time of one process goes to, stage by stage
--kinds   ours on the same documents as JSON lines, the same packed by zstandard, and parquet
--memory  peak memory on a small corpus and on one ten times as large
"""

import argparse
import gzip
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from competitors import Gone, machine, reason

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data" / "corpora"
EOD = 50256
BATCH = 1000
# GPT-2's published pattern.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


# The corpus


def documents() -> Iterator[str]:
    if not SHARED.is_dir():
        from gptworks.data import sample_corpus

        yield from sample_corpus.documents("sample:python")
        return
    with (SHARED / "openwebtext-1000" / "openwebtext-1000.jsonl").open(encoding="utf-8") as lines:
        yield from (json.loads(line)["text"] for line in lines)
    yield from (SHARED / "wikitext-2" / "wiki.train.tokens").read_text(encoding="utf-8").split("\n \n = ")
    with gzip.open(SHARED / "enwik8" / "enwik8.gz") as file:
        yield from file.read().decode("utf-8", "replace").split("</page>")


def write_corpus(path: Path, megabytes: float) -> None:
    """Documents until the size is reached, from the beginning again when they are used up."""
    size = 0
    with path.open("w", encoding="utf-8") as file:
        while size < megabytes * 1e6:
            for text in documents():
                size += file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                if size >= megabytes * 1e6:
                    return


# The competitors: (corpus, folder for the result, processes) -> seconds of work


def batches(corpus: Path) -> Iterator[list[str]]:
    import orjson

    batch: list[str] = []
    with corpus.open("rb") as lines:
        for line in lines:
            batch.append(orjson.loads(line)["text"])
            if len(batch) == BATCH:
                yield batch
                batch = []
    if batch:
        yield batch


def write_plainly(out: Path, rows_of_batches: Iterator[list[list[int]]]) -> None:
    sizes = []
    with (out / "ids").open("wb") as file:
        for rows in rows_of_batches:
            for row in rows:
                row.append(EOD)
                sizes.append(len(row))
            flat = np.fromiter((i for row in rows for i in row), np.uint16, sum(map(len, rows)))
            file.write(flat.tobytes())
    np.save(out / "sizes.npy", np.array(sizes, np.int32))


def hugging_face(corpus: Path, out: Path, processes: int) -> float:
    os.environ["RAYON_NUM_THREADS"] = str(processes)
    from gptworks.tokenizer import Tokenizer

    backend = Tokenizer.from_pretrained("gpt2").backend
    before = time.perf_counter()
    encode = backend.encode_batch_fast
    write_plainly(out, ([e.ids for e in encode(batch, add_special_tokens=False)] for batch in batches(corpus)))
    return time.perf_counter() - before


def tiktoken(corpus: Path, out: Path, processes: int) -> float:
    import tiktoken as library

    from gptworks.tokenizer.bundled import gpt2_files

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    to_byte = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    vocab = json.loads(gpt2_files()[0].read_text(encoding="utf-8"))
    vocab.pop("<|endoftext|>")
    ranks = {bytes(to_byte[letter] for letter in token): rank for token, rank in vocab.items()}
    encoding = library.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    before = time.perf_counter()
    write_plainly(out, (encoding.encode_ordinary_batch(b, num_threads=processes) for b in batches(corpus)))
    return time.perf_counter() - before


def gigatoken(corpus: Path, out: Path, processes: int) -> float:
    os.environ["RAYON_NUM_THREADS"] = str(processes)
    import gigatoken as library

    from gptworks.tokenizer import Tokenizer

    tokenizer = library.Tokenizer.from_json(Tokenizer.from_pretrained("gpt2").backend.to_str())
    before = time.perf_counter()
    rows = tokenizer.encode_files(library.JsonlFileSource([str(corpus)]), parallel=processes > 1).layout
    ids, offsets = np.asarray(rows.content.data), np.asarray(rows.offsets.data)
    ends = offsets[1:] + np.arange(1, len(offsets))
    marked = np.full(len(ids) + len(ends), EOD, np.uint16)
    is_text = np.ones(len(marked), dtype=bool)
    is_text[ends - 1] = False
    marked[is_text] = ids
    marked.tofile(out / "ids")
    np.save(out / "sizes.npy", np.diff(offsets).astype(np.int32) + 1)
    return time.perf_counter() - before


def ours(corpus: Path, out: Path, processes: int, *, quick: bool = True) -> float:
    from gptworks.data import encode, prepare
    from gptworks.tokenizer import Tokenizer

    if not quick:
        encode.fast_encoder = lambda tokenizer: None
        os.environ["RAYON_NUM_THREADS"] = "1" if processes > 1 else str(processes)
    tokenizer = Tokenizer.from_pretrained("gpt2")
    before = time.perf_counter()
    prepare.prepare(prepare.PrepareJob([str(corpus)], out / "store", tokenizer, append_eod=True, workers=processes))
    seconds = time.perf_counter() - before
    (out / "store.bin").rename(out / "ids")
    return seconds


def ours_with_hugging_face(corpus: Path, out: Path, processes: int) -> float:
    return ours(corpus, out, processes, quick=False)


COMPETITORS: dict[str, Callable[[Path, Path, int], float]] = {
    "tokenizers": hugging_face,
    "tiktoken": tiktoken,
    "gigatoken": gigatoken,
    "ours": ours,
    "ours, HF": ours_with_hugging_face,
}


# Running them


def work(name: str, corpus: Path, out: Path, processes: int) -> None:
    print(json.dumps({"work": COMPETITORS[name](corpus, out, processes)}))


def resident_mb(process: int) -> float:
    """Of a process and all that it started."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    kilobytes = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")), 0)
    return kilobytes / 1e3 + sum(resident_mb(int(child)) for child in children)


def run(name: str, corpus: Path, processes: int) -> dict[str, object]:
    out = Path(tempfile.mkdtemp(dir=corpus.parent))
    command = [sys.executable, __file__, "--work", name, str(corpus), str(out), str(processes)]
    before = time.perf_counter()
    peak = 0.0
    with (out / "answer").open("w+") as answer, (out / "errors").open("w+") as errors:
        started = subprocess.Popen(command, stdout=answer, stderr=errors)
        while started.poll() is None:
            peak = max(peak, resident_mb(started.pid))
            time.sleep(0.02)
        whole = time.perf_counter() - before
        if started.returncode:
            errors.seek(0)
            raise Gone(reason(started.returncode, errors.read()))
        answer.seek(0)
        seconds = json.loads(answer.read().splitlines()[-1])["work"]
    with (out / "ids").open("rb") as file:
        ids = hashlib.file_digest(file, "sha256").hexdigest()
    shutil.rmtree(out)
    return {"work": seconds, "whole": whole, "peak_mb": peak, "ids": ids}


def compare(names: list[str], corpus: Path, processes: int, rounds: int) -> None:
    size = corpus.stat().st_size / 1e6
    results: dict[str, list[dict[str, object]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in list(results):
            try:
                results[name].append(run(name, corpus, processes))
            except Gone as error:
                del results[name]
                print(f"left out: {name}: {error}")
    if len({result["ids"] for found in results.values() for result in found}) > 1:
        sys.exit("the competitors do not agree on the ids")
    print(f"\n{size:.0f} MB of JSON lines, {processes} process(es), medians of {rounds}; all gave the same ids")
    print(f"{'':14} {'MB/s, whole':>12} {'MB/s, work':>12} {'ours is':>9} {'peak MB':>9}")
    median = {
        name: {key: statistics.median(float(str(r[key])) for r in found) for key in ("whole", "work", "peak_mb")}
        for name, found in results.items()
    }
    for name, found in median.items():
        ratio = f"{found['whole'] / median['ours']['whole']:.2f}x" if "ours" in median else ""
        print(
            f"{name:14} {size / found['whole']:12.1f} {size / found['work']:12.1f} {ratio:>9} {found['peak_mb']:9.0f}"
        )


def where(corpus: Path) -> None:
    """Each stage of one process over the whole corpus, by itself."""
    import zlib

    from gptworks.data import corpus as documents_of
    from gptworks.data.encode import Encoder
    from gptworks.data.text_blocks import FileRange, TextRules, cut
    from gptworks.data.text_files import list_inputs
    from gptworks.tokenizer import Tokenizer

    spent: dict[str, float] = {}

    def timed(name: str, action: Callable[[], object]) -> object:
        before = time.perf_counter()
        result = action()
        spent[name] = spent.get(name, 0.0) + time.perf_counter() - before
        return result

    rules, dtype = TextRules(), np.dtype(np.uint16)
    tokenizer = Tokenizer.from_pretrained("gpt2")
    encoder = timed(
        "start: load and check the encoder",
        lambda: Encoder(tokenizer, rules, dtype, append_eod=True, may_be_quick=True),
    )
    timed("start: identity of the tokenizer", lambda: tokenizer.identity)
    assert isinstance(encoder, Encoder)
    digest = hashlib.sha256()
    with (corpus.parent / "ids").open("wb") as file:
        for block in cut(list_inputs([str(corpus)])[0], rules, []):
            assert isinstance(block.data, FileRange)
            data = timed("read", block.data.read)
            parsed = timed("JSON", lambda data=data: documents_of._parse_lines(data, rules.keys))
            texts = [text for (text,) in parsed.documents]
            as_bytes = timed("text to UTF-8", lambda texts=texts: [text.encode() for text in texts])
            ids, sizes = timed("ids", lambda t=texts, b=as_bytes: encoder._ids(t, b))
            timed("check a sample", lambda texts=texts: encoder._disagreement(texts))
            marked = timed("mark ends", lambda i=ids, s=sizes, b=block: encoder._finish_documents(i, s, b)[0])
            tokens = timed("to 16 bits", lambda marked=marked: marked.astype(dtype).tobytes())
            timed("checksums", lambda tokens=tokens: (zlib.crc32(tokens), digest.update(tokens)))
            timed("write", lambda tokens=tokens: file.write(tokens))
    total = sum(spent.values())
    print(f"\nwhere {total:.2f} s of one process go ({corpus.stat().st_size / 1e6:.0f} MB)")
    for name, seconds in spent.items():
        print(f"  {name:36} {seconds:7.3f} s {seconds / total:6.1%}")


def kinds(corpus: Path, processes: int, rounds: int) -> None:
    """Seconds of the whole process for the same documents in other files; all must give the same ids."""
    import pyarrow
    import pyarrow.parquet
    import zstandard

    files = {"jsonl": corpus, "jsonl.zst": corpus.with_suffix(".jsonl.zst"), "parquet": corpus.with_suffix(".parquet")}
    with files["jsonl"].open("rb") as source, files["jsonl.zst"].open("wb") as target:
        zstandard.ZstdCompressor(level=3).copy_stream(source, target)
    with pyarrow.parquet.ParquetWriter(files["parquet"], pyarrow.schema([("text", pyarrow.string())])) as table:
        for batch in batches(corpus):
            table.write_table(pyarrow.table({"text": batch}))
    results: dict[str, list[dict[str, object]]] = {name: [] for name in files}
    for _ in range(rounds):
        for name, path in files.items():
            results[name].append(run("ours", path, processes))
    if len({result["ids"] for found in results.values() for result in found}) > 1:
        sys.exit("the kinds of files do not give the same ids")
    size = corpus.stat().st_size / 1e6
    print(f"\n{size:.0f} MB as JSON lines, {processes} process(es), {rounds} rounds; the same ids from all")
    plain = statistics.median(float(str(result["whole"])) for result in results["jsonl"])
    for name, found in results.items():
        times = sorted(float(str(result["whole"])) for result in found)
        middle = statistics.median(times)
        spread = f"{times[0]:.2f} to {times[-1]:.2f} s"
        print(f"{name:14} {size / middle:8.1f} MB/s {plain / middle:8.2f}x jsonl   {spread}")


def memory(folder: Path, megabytes: float) -> None:
    peaks = []
    for size in (megabytes, 10 * megabytes):
        corpus = folder / f"{size:.0f}.jsonl"
        write_corpus(corpus, size)
        for processes in (1, 2):
            peaks.append((processes, size, run("ours", corpus, processes)["peak_mb"]))
        corpus.unlink()
    print("\npeak memory of ours, all its processes together")
    for processes, size, peak in sorted(peaks):
        print(f"  {processes} process(es), {size:5.0f} MB: {peak:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=120)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", nargs="+", choices=COMPETITORS, default=list(COMPETITORS))
    parser.add_argument("--where", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--kinds", action="store_true")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        name, corpus, out, processes = args.work
        work(name, Path(corpus), Path(out), int(processes))
        return
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        if args.memory:
            memory(Path(folder), args.megabytes)
            return
        corpus = Path(folder) / "corpus.jsonl"
        write_corpus(corpus, args.megabytes)
        if args.where:
            where(corpus)
            return
        if args.kinds:
            kinds(corpus, args.processes[-1], args.rounds)
            return
        for processes in args.processes:
            compare(args.only, corpus, processes, args.rounds)


if __name__ == "__main__":
    main()
