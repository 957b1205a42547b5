"""From any format to any other: every token, and every border that both of them keep."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from gptworks.data.convert import convert
from gptworks.data.formats import registry
from gptworks.data.formats.contents import Contents
from gptworks.data.inspect import checksum_problems, inspect
from gptworks.data.store import Store, locate_stores
from gptworks.errors import DataError, TokenizerError
from gptworks.tokenizer import Tokenizer

FORMATS = list(registry.FORMATS)
KEEP_DOCUMENTS = {"megatron", "tnt", "paddle", "paddle-npz"}
ROW = 20


def to(source: Path | str, destination: Path, name: str, **options):
    return convert([str(source)], destination, registry.FORMATS[name], **options)


def rows(name: str) -> dict[str, int]:
    return {"row_length": ROW} if name == "mindrecord" else {}


def path_of(done) -> Path:
    """A file that names what was written."""
    return next(file for file in done.files if any(format_.find(file) for format_ in registry.FORMATS.values()))


@pytest.fixture(scope="module")
def whole(small_store: Path) -> Store:
    return Store(small_store)


@pytest.mark.slow
@pytest.mark.parametrize("second", FORMATS)
@pytest.mark.parametrize("first", FORMATS)
def test_any_to_any(first: str, second: str, small_store: Path, whole: Store, tmp_path: Path) -> None:
    one = path_of(to(small_store, tmp_path / "a" / "one", first, verify=True, **rows(first)))
    two = Store(path_of(to(one, tmp_path / "b" / "two", second, verify=True, **rows(second))))
    assert second == two.located.format.NAME
    kept = len(whole.tokens) // ROW * ROW if "mindrecord" in (first, second) else len(whole.tokens)
    assert np.array_equal(two.tokens[:], whole.tokens[:kept])
    if second in KEEP_DOCUMENTS and first != "mindrecord":
        # nanoGPT's and llm.c's streams get their documents back from the end-of-document tokens.
        assert two.document_starts.tolist() == whole.document_starts.tolist()
    assert two.sidecar is not None and whole.sidecar is not None
    assert two.sidecar.tokenizer_identity == whole.sidecar.tokenizer_identity
    assert two.load_tokenizer().eod_id == 511
    assert checksum_problems(two) == []
    assert inspect(two, everything=True).damage == []


def test_to_megatron_and_back_is_the_same_bytes(small_store: Path, tmp_path: Path) -> None:
    for name in ("tnt", "paddle", "paddle-npz", "nanogpt", "llmc"):
        there = path_of(to(small_store, tmp_path / name / "x", name))
        to(there, tmp_path / name / "back", "megatron")
        for suffix in (".bin", ".idx"):
            back = (tmp_path / name / f"back{suffix}").read_bytes()
            assert back == small_store.with_suffix(suffix).read_bytes(), name


def test_a_dataset_nobody_described(whole: Store, small_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Without a tokenizer nothing is said about one; a bare stream stays one document."""
    tokens = np.array(whole.tokens)
    tokens.tofile(tmp_path / "train.bin")
    done = to(tmp_path / "train.bin", tmp_path / "out", "megatron")
    assert [file.name for file in done.files] == ["out.bin", "out.idx"]
    assert Store(tmp_path / "out").num_documents == 1
    assert done.notes[0].startswith(f"{tmp_path / 'train.bin'}: where its documents end is not known")
    small_tokenizer.save(tmp_path / "tokenizer")
    tokenizer = Tokenizer.from_pretrained(tmp_path / "tokenizer")
    done = to(tmp_path / "train.bin", tmp_path / "out2", "megatron", tokenizer=tokenizer)
    store = Store(tmp_path / "out2")
    assert done.notes == [] and store.sidecar is not None and store.sidecar.eod_appended
    assert store.document_starts.tolist() == whole.document_starts.tolist()


def test_a_folder_of_shards_becomes_one(whole: Store, small_store: Path, tmp_path: Path, monkeypatch) -> None:
    from gptworks.data.formats import llmc

    monkeypatch.setattr(llmc, "SHARD_TOKENS", 5000)
    done = to(small_store, tmp_path / "shards" / "s", "llmc", verify=True)
    shards = [file for file in done.files if file.suffix == ".bin"]
    assert len(shards) == -(-len(whole.tokens) // 5000)
    assert [each.main for each in locate_stores(str(tmp_path / "shards"))] == shards
    assert [each.main for each in locate_stores(str(tmp_path / "shards" / "s_*.bin"))] == shards
    joined = to(tmp_path / "shards", tmp_path / "one", "megatron", verify=True)
    assert len(joined.sources) == len(shards)
    assert np.array_equal(Store(tmp_path / "one").tokens, whole.tokens)


def test_prompts_and_completions_keep_their_sequences(small_tokenizer: Tokenizer, tmp_path: Path) -> None:
    from gptworks.data.prepare import PrepareJob, prepare
    from gptworks.data.text_blocks import TextRules

    lines = [json.dumps({"q": f"question {i}", "a": f"answer {i}"}) for i in range(5)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    rules = TextRules(keys=("q", "a"))
    prepare(PrepareJob([str(tmp_path / "x.jsonl")], tmp_path / "x", small_tokenizer, rules=rules, append_eod=True))
    for name in ("tnt", "paddle"):
        there = path_of(to(tmp_path / "x", tmp_path / name / "x", name, verify=True))
        back = to(there, tmp_path / name / "back", "megatron", verify=True)
        assert (back.documents, Store(tmp_path / name / "back").sidecar.kind) == (5, "examples")
        assert (tmp_path / name / "back.idx").read_bytes() == (tmp_path / "x.idx").read_bytes()
    with pytest.raises(DataError, match="holds prompts and completions, which nanogpt cannot keep apart"):
        to(tmp_path / "x", tmp_path / "n", "nanogpt")


def nothing_at(folder: Path) -> bool:
    return not folder.exists() or not any(folder.iterdir())


def test_ids_that_do_not_fit_leave_nothing_behind(tmp_path: Path) -> None:
    contents = Contents(np.array([1, 2, 70_000, 4], np.int32), np.array([4]), np.array([0, 1]))
    registry.FORMATS["megatron"].write(tmp_path / "wide", contents, None)
    with pytest.raises(DataError, match=r"token 2 is id 70000, which uint16 does not hold"):
        to(tmp_path / "wide", tmp_path / "out" / "x", "nanogpt")
    assert nothing_at(tmp_path / "out")


def test_documents_too_long_for_the_old_npz(tmp_path: Path) -> None:
    contents = Contents(np.zeros(70_010, np.uint16), np.array([10, 70_000]), np.array([0, 1, 2]))
    registry.FORMATS["megatron"].write(tmp_path / "long", contents, 512)
    with pytest.raises(DataError, match=r"document 1\b.*70000"):
        to(tmp_path / "long", tmp_path / "out" / "x", "paddle-npz")
    assert nothing_at(tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "mindrecord"}, "--to mindrecord: its rows are training samples. Needed: --row-length"),
        ({"name": "mindrecord", "row_length": 10**6}, "tokens do not fill one row of 1000000. Use more text"),
        ({"name": "tnt", "from_format": registry.FORMATS["paddle"]}, "--from paddle, but it is of format megatron"),
    ],
)
def test_refusals(options: dict, message: str, small_store: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        to(small_store, tmp_path / "out" / "x", **options)
    assert nothing_at(tmp_path / "out")


def test_the_source_is_not_overwritten(small_store: Path, tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(small_store.with_suffix(suffix), tmp_path / f"x{suffix}")
    before = (tmp_path / "x.bin").read_bytes()
    with pytest.raises(DataError, match=r"x\.bin: is the source itself\. Choose another destination"):
        to(tmp_path / "x", tmp_path / "x", "tnt")
    assert (tmp_path / "x.bin").read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.bin", "x.idx"]


def test_a_writer_that_loses_a_token_is_found(small_store: Path, tmp_path: Path, monkeypatch) -> None:
    from gptworks.data.formats import nanogpt

    real = nanogpt.write

    def forgetful(prefix: Path, contents: Contents, vocab_size: int | None) -> list[Path]:
        written = real(prefix, contents, vocab_size)
        data = bytearray(written[0].read_bytes())
        data[2000] ^= 1
        written[0].write_bytes(data)
        return written

    monkeypatch.setattr(nanogpt, "write", forgetful)
    with pytest.raises(DataError, match="token 1000 came back different: nothing is kept"):
        to(small_store, tmp_path / "out" / "x", "nanogpt", verify=True)
    assert nothing_at(tmp_path / "out")


def test_tokenizers_must_agree(small_store: Path, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="was made with another tokenizer"):
        to(small_store, tmp_path / "x", "tnt", tokenizer=Tokenizer.from_pretrained("gpt2"))
    np.arange(50, dtype=np.uint16).tofile(tmp_path / "bare.bin")
    done = [str(small_store), str(tmp_path / "bare.bin")]
    with pytest.raises(DataError, match=r"bare\.bin: its tokenizer is not known"):
        convert(done, tmp_path / "x", registry.FORMATS["megatron"])


@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_destination_with_the_ending_people_write(ending: str, small_store: Path, tmp_path: Path) -> None:
    done = to(small_store, tmp_path / f"y{ending}", "tnt")
    assert [file.name for file in done.files] == ["y.bin", "y.idx", "y.tokenizer.json", "y.json"]


# What an older dataset leaves at the prefix


def test_another_format_at_the_same_prefix_leaves_nothing_of_the_old(small_store: Path, tmp_path: Path) -> None:
    for name in ("megatron", "nanogpt", "tnt", "nanogpt", "megatron"):
        done = to(small_store, tmp_path / "x", name)
        assert name == Store(path_of(done)).located.format.NAME
        assert len(locate_stores(str(tmp_path))) == 1


def test_fewer_shards_than_before(small_store: Path, tmp_path: Path, monkeypatch) -> None:
    from gptworks.data.formats import llmc

    monkeypatch.setattr(llmc, "SHARD_TOKENS", 3000)
    assert len(to(small_store, tmp_path / "x", "llmc").files) > 6
    (tmp_path / "x_train_000001.bin").write_bytes((tmp_path / "x_000001.bin").read_bytes())  # somebody else's
    monkeypatch.setattr(llmc, "SHARD_TOKENS", 10**9)
    to(small_store, tmp_path / "x", "llmc")
    assert [each.main.name for each in locate_stores(str(tmp_path))] == ["x_000000.bin", "x_train_000001.bin"]


def test_no_old_sidecar_beside_new_tokens(small_store: Path, whole: Store, tmp_path: Path) -> None:
    to(small_store, tmp_path / "x", "megatron")
    reversed_ids = Contents(np.array(whole.tokens)[::-1].copy(), whole.contents.sizes, whole.contents.documents)
    registry.FORMATS["megatron"].write(tmp_path / "other", reversed_ids, None)
    done = to(tmp_path / "other", tmp_path / "x", "megatron")
    assert [file.name for file in done.files] == ["x.bin", "x.idx"]
    assert Store(tmp_path / "x").sidecar is None


def test_a_sidecar_of_another_format_is_refused(small_store: Path, tmp_path: Path) -> None:
    to(small_store, tmp_path / "x", "tnt")
    sidecar = (tmp_path / "x.json").read_text()
    to(small_store, tmp_path / "x", "megatron")
    (tmp_path / "x.json").write_text(sidecar)
    with pytest.raises(
        DataError, match=r"x\.json: describes a dataset of format tnt, but .*x\.bin is of format megatron"
    ):
        Store(tmp_path / "x")


@pytest.mark.parametrize("name", FORMATS)
def test_documents_of_several_sequences_and_of_none(name: str, small_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """What a format does not keep may be lost, but what is written can be read and is verified."""
    contents = Contents(np.arange(40, dtype=np.uint16), np.array([3, 7, 0, 10, 20]), np.array([0, 2, 3, 3, 5]))
    registry.FORMATS["megatron"].write(tmp_path / "source", contents, 512)
    options = {"row_length": 8} if name == "mindrecord" else {}
    done = to(tmp_path / "source", tmp_path / "x", name, verify=True, tokenizer=small_tokenizer, **options)
    assert Store(path_of(done)).tokens[:].tolist() == list(range(40))


# inspect and verify


@pytest.mark.parametrize("name", FORMATS)
def test_every_flipped_byte_of_a_file_is_found(name: str, small_store: Path, tmp_path: Path) -> None:
    done = to(small_store, tmp_path / "x", name, **rows(name))
    hashed = [file for file in done.files if not file.name.endswith(".json")]
    for file in hashed:
        whole = file.read_bytes()
        for place in (len(whole) // 3, len(whole) - 1):
            damaged = bytearray(whole)
            damaged[place] ^= 64
            file.write_bytes(damaged)
            try:
                store = Store(path_of(done))
            except DataError:
                continue  # found by opening it
            assert any(str(file) in problem and "sha256" in problem for problem in checksum_problems(store))
        file.write_bytes(whole)


def test_what_inspect_sees(whole: Store) -> None:
    report = inspect(whole)
    found = report.as_dict()
    lengths = np.diff(whole.document_starts)
    assert (found["format"], found["dtype"], found["documents"]) == ("megatron", "uint16", 160)
    assert found["tokens"] == found["tokens_scanned"] == len(whole.tokens)
    assert (found["shortest"], found["longest"]) == (lengths.min(), lengths.max())
    assert found["mean"] == pytest.approx(lengths.mean())
    assert sum(count for *_, count in found["histogram"]) == 160
    for first, last, count in found["histogram"]:
        assert ((lengths >= first) & (lengths <= last)).sum() == count
    assert (found["lowest_id"], found["highest_id"]) == (int(whole.tokens.min()), 511)
    assert found["eod_count"] == 160
    assert found["first_text"].startswith(whole.load_tokenizer().decode(whole.tokens[:20]))
    assert found["problems"] == [] and found["remarks"] == []


def test_ids_that_cannot_be_decoded_are_still_named(tmp_path: Path) -> None:
    contents = Contents(np.array([1, -5, 3], np.int32), np.array([3]), np.arange(2))
    registry.FORMATS["megatron"].write(tmp_path / "x", contents, None)
    found = inspect(Store(tmp_path / "x"), Tokenizer.from_pretrained("gpt2")).as_dict()
    assert found["problems"] == ["id -5 is negative"] and found["first_text"] is None


def test_ids_outside_the_vocabulary_and_empty_documents(tmp_path: Path) -> None:
    contents = Contents(np.array([1, 60_000, 3], np.uint16), np.array([2, 0, 1]), np.arange(4))
    registry.FORMATS["megatron"].write(tmp_path / "x", contents, None)
    report = inspect(Store(tmp_path / "x"), Tokenizer.from_pretrained("gpt2"))
    assert report.damage == ["id 60000 is outside the vocabulary of 50257"]
    assert report.remarks == ["1 documents have no tokens", "no sidecar: checksums are not known"]
    assert report.histogram() == [(0, 0, 1), (1, 1, 1), (2, 3, 1)]
