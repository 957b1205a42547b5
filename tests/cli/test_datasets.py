"""convert, inspect and verify as a user calls them, and training straight from every format."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from gptworks.cli import options
from gptworks.data.formats import registry
from gptworks.data.store import Store

FORMATS = list(registry.FORMATS)


def copy_store(small_store: Path, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file in small_store.parent.glob(f"{small_store.name}.*"):
        shutil.copy(file, folder / file.name)
    return folder / small_store.name


def test_help_names_every_format() -> None:
    assert options.DATASET_FORMATS.replace(" or ", ", ").split(", ") == FORMATS


def test_convert_prints_what_it_did(call, small_store: Path, tmp_path: Path) -> None:
    done = call("convert", small_store, tmp_path / "x", "--to", "paddle", "--verify")
    tokens = len(Store(small_store).tokens)
    assert f"(megatron) -> paddle: 160 documents, {tokens:,} tokens" in done.out
    size = (tmp_path / "x_ids.npy").stat().st_size
    assert f"{tmp_path / 'x_ids.npy'}  {size:,} bytes" in done.out
    assert "verified: every token" in done.out
    found = json.loads(call("convert", tmp_path / "x", tmp_path / "y", "--to", "megatron", "--json").out)
    assert (found["from"], found["to"], found["documents"], found["tokens"]) == (["paddle"], "megatron", 160, tokens)
    assert (tmp_path / "y.bin").read_bytes() == small_store.with_suffix(".bin").read_bytes()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--to", "hdf5"], "--to: no format 'hdf5'. Formats: megatron, tnt,"),
        (["--to", "tnt", "--from", "csv"], "--from: no format 'csv'"),
        (["--to", "mindrecord", "--row-length", "1"], "--row-length: got 1; needs 2 or more"),
        (["--to", "mindrecord"], "Needed: --row-length, seq_len + 1"),
    ],
)
def test_convert_options_that_do_not_fit(
    args: list[str], message: str, call, small_store: Path, tmp_path: Path
) -> None:
    done = call("convert", small_store, tmp_path / "out" / "x", *args, expect=2)
    assert message in done.err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_nothing_there(verb: str, call, tmp_path: Path) -> None:
    assert f"{tmp_path / 'gone'}: no such dataset" in call(verb, tmp_path / "gone", expect=2).err
    assert f"{tmp_path}: no dataset in this folder" in call(verb, tmp_path, expect=2).err
    (tmp_path / "notes.txt").write_text("no tokens")
    assert "notes.txt: not a dataset of a known format" in call(verb, tmp_path / "notes.txt", expect=2).err


def test_what_a_name_without_a_dataset_may_mean(call, small_store: Path, tmp_path: Path) -> None:
    call("convert", small_store, tmp_path / "x", "--to", "llmc")
    assert (
        f"is in shards. Give the folder they are in, or the pattern '{tmp_path / 'x'}_*.bin'"
        in call("inspect", tmp_path / "x", expect=2).err
    )
    (tmp_path / "y.part").mkdir()
    assert (
        "was stopped before it was finished"
        in call("train", f"data.path={tmp_path / 'y'}", "train.steps=1", expect=2).err
    )


def test_a_dataset_that_is_replaced_is_told(call, corpus_file: Path, small_store: Path, tmp_path: Path) -> None:
    for verb in (
        ["prepare", corpus_file, "--out", tmp_path / "x"],
        ["convert", small_store, tmp_path / "y", "--to", "tnt"],
    ):
        first, second = call(*verb), call(*verb)
        assert "replaced" not in first.out + first.err
        assert f"note: replaced the dataset that was at {verb[-1] if verb[0] == 'prepare' else tmp_path / 'y'}" in (
            second.out + second.err
        )


def test_inspect_shows_lengths_and_text(call, small_store: Path) -> None:
    out = call("inspect", small_store).out
    assert "megatron (Megatron .bin/.idx, memory-mapped)" in out
    assert "text: 160 documents, " in out and "160 end-of-document tokens" in out
    bars = [line for line in out.splitlines() if "█" in line]
    assert sum(int(line.split()[1].replace(",", "")) for line in bars) == 160
    assert max(line.count("█") for line in bars) == 40
    assert 'first document: "' in out and "problem" not in out
    several = json.loads(call("inspect", small_store.parent, "--json").out)
    assert several["documents"] == 160


def test_verify_finds_one_changed_byte(call, small_store: Path, tmp_path: Path) -> None:
    prefix = copy_store(small_store, tmp_path)
    assert "whole (160 documents" in call("verify", prefix).out
    assert json.loads(call("verify", tmp_path, "--json").out)[0]["checksums"] == [".bin", ".idx"]
    file = prefix.with_suffix(".bin")
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    err = call("verify", prefix, expect=2).err
    assert f"{file}: sha256 " in err and "Copy it again" in err


def test_verify_names_every_damaged_dataset_of_a_folder(call, small_store: Path, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        call("convert", small_store, tmp_path / name, "--to", "megatron")
    (tmp_path / "a.bin").write_bytes((tmp_path / "a.bin").read_bytes()[:-2])
    data = bytearray((tmp_path / "b.bin").read_bytes())
    data[50] ^= 1
    (tmp_path / "b.bin").write_bytes(data)
    done = call("verify", tmp_path, expect=2)
    assert "a.bin: " in done.err and "b.bin: sha256" in done.err and "c.bin: whole" in done.out


def test_convert_does_not_vouch_for_damage(call, small_store: Path, tmp_path: Path) -> None:
    prefix = copy_store(small_store, tmp_path / "s")
    file = prefix.with_suffix(".bin")
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    err = call("convert", prefix, tmp_path / "out" / "x", "--to", "paddle", "--verify", expect=2).err
    assert f"{file}: sha256" in err and not (tmp_path / "out").exists()
    data[101] = 255  # an id above 511, too
    file.write_bytes(data)
    err = call("convert", prefix, tmp_path / "out" / "x", "--to", "paddle", expect=2).err
    assert "is outside the vocabulary of 512" in err and not (tmp_path / "out").exists()


def test_verify_without_a_sidecar_looks_at_the_ids(call, tmp_path: Path) -> None:
    np.array([3, -1, 2], np.int32).tofile(tmp_path / "x.bin")
    from gptworks.data.formats import megatron
    from gptworks.data.formats.contents import Contents

    contents = Contents(np.array([3, -1, 2], np.int32), np.array([3]), np.array([0, 1]))
    megatron.write(tmp_path / "x", contents, None)
    assert "id -1 is negative" in call("verify", tmp_path / "x", expect=2).err
    megatron.write(tmp_path / "x", Contents(np.array([3, 1, 2]), np.array([3]), np.array([0, 1])), None)
    assert "no sidecar, so no checksums" in call("verify", tmp_path / "x").out


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory, call, small_store: Path, recipe):
    """Losses of a short run on a dataset."""

    def train(path: Path | str, *more: str) -> list[float]:
        out = tmp_path_factory.mktemp("run")
        call("train", "-c", recipe, "--out", out / "r", f"data.path={path}", "train.steps=3", *more)
        return [json.loads(line)["loss"] for line in (out / "r" / "metrics.jsonl").read_text().splitlines()]

    return train


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tnt", "paddle", "paddle-npz"])
def test_training_on_formats_that_keep_documents_is_the_same_run(
    name: str, call, losses, small_store: Path, tmp_path: Path
) -> None:
    call("convert", small_store, tmp_path / "x", "--to", name)
    assert losses(tmp_path) == losses(small_store)


@pytest.mark.parametrize("name", ["nanogpt", "llmc"])
def test_training_on_a_bare_stream_shares_out_its_tokens(
    name: str, call, losses, small_store: Path, tmp_path: Path
) -> None:
    call("convert", small_store, tmp_path / "x", "--to", name)
    # All of it is the same stream of windows as the store's.
    assert losses(tmp_path, "data.split=1,0,0") == losses(small_store, "data.split=1,0,0")
    # The last tenth of the tokens is held out.
    from gptworks.config import DataConfig
    from gptworks.data.dataset import Dataset

    dataset = Dataset(DataConfig(path=(str(tmp_path),), seq_len=16, split=(90, 10)), vocab_size=512)
    tokens = Store(small_store).tokens
    border = round(0.9 * len(tokens))
    assert dataset.samples("held_out").at(0, 1)[0].tokens.tolist() == tokens[border : border + 17].tolist()
    assert dataset.samples("train").per_epoch == (border - 1) // 16


def test_training_on_mindrecord_takes_rows_as_samples(call, losses, small_store: Path, tmp_path: Path) -> None:
    call("convert", small_store, tmp_path / "x", "--to", "mindrecord", "--row-length", "17")
    assert len(losses(tmp_path / "x.mindrecord")) == 3
    from gptworks.config import DataConfig
    from gptworks.data.dataset import Dataset

    cfg = DataConfig(path=(str(tmp_path / "x"),), seq_len=16, split=(1, 0, 0), order="sequential")
    samples = Dataset(cfg, vocab_size=512).samples("train")
    tokens = Store(small_store).tokens
    assert samples.per_epoch == len(tokens) // 17
    assert samples.at(3, 1)[0].tokens.tolist() == tokens[51:68].tolist()


def test_rows_of_another_length_are_refused(call, recipe, small_store: Path, tmp_path: Path) -> None:
    call("convert", small_store, tmp_path / "x", "--to", "mindrecord", "--row-length", "33")
    err = call("train", "-c", recipe, "--out", tmp_path / "r", f"data.path={tmp_path / 'x'}", expect=2).err
    assert "row 0 has 33 tokens" in err and "Set data.seq_len=32" in err


def test_held_out_text_of_its_own(call, recipe, small_store: Path, tmp_path: Path) -> None:
    """nanoGPT's pair of files: all of train.bin is trained on, val.bin is evaluated."""
    tokens = np.array(Store(small_store).tokens)
    tokens[:8000].tofile(tmp_path / "train.bin")
    tokens[8000:9000].tofile(tmp_path / "val.bin")
    data = [f"data.path={tmp_path / 'train.bin'}", f"data.held_out_path={tmp_path / 'val.bin'}"]
    call(
        "train", "-c", recipe, "--out", tmp_path / "r", *data, "train.steps=2", "evaluate.every=2", "evaluate.batches=0"
    )
    last = json.loads((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()[-1])
    measured = call("eval", "--model", tmp_path / "r", "--data", tmp_path / "val.bin", "--split", "all", "--json").out
    assert last["held_out_loss"] == pytest.approx(json.loads(measured)["rows"][0]["loss"], rel=1e-5)
    from gptworks.config import DataConfig
    from gptworks.data.dataset import Dataset

    paths = {"path": (str(tmp_path / "train.bin"),), "held_out_path": (str(tmp_path / "val.bin"),)}
    dataset = Dataset(DataConfig(**paths, seq_len=16, split=(90, 10)), vocab_size=512)
    assert dataset.samples("train").per_epoch == 7999 // 16
    assert dataset.samples("held_out").per_epoch == 999 // 16


def test_a_share_that_was_trained_on_is_not_called_held_out(call, recipe, small_store: Path, tmp_path: Path) -> None:
    own = copy_store(small_store, tmp_path / "own")
    data = [f"data.path={small_store}", f"data.held_out_path={own}"]
    call("train", "-c", recipe, "--out", tmp_path / "r", *data, "train.steps=2", "checkpoint.every=1")
    evaluate = ["eval", "--model", tmp_path / "r", "--data"]
    err = call(*evaluate, small_store, expect=2).err
    assert "the run held out text of its own" in err and f"--data {own} --split all" in err
    call(*evaluate, own, "--split", "all")
    # Without it the run would have other samples.
    err = call("train", "-c", recipe, "--out", tmp_path / "r", "--resume", "auto", data[0], expect=2).err
    assert "data.held_out_path" in err


@pytest.mark.parametrize("order", ["megatron", "paddle", "oneflow"])
def test_held_out_rows_cannot_be_laid_out_by_another_system(
    order: str, call, recipe, small_store: Path, tmp_path: Path
) -> None:
    call("convert", small_store, tmp_path / "x", "--to", "mindrecord", "--row-length", "17")
    data = [f"data.path={small_store}", f"data.held_out_path={tmp_path / 'x'}", f"data.order={order}"]
    err = call("train", "-c", recipe, "--out", tmp_path / "r", *data, "evaluate.every=2", expect=2).err
    assert f"data.order: {order} cuts running text into samples" in err


def test_what_is_being_written_is_no_dataset_yet(call, small_store: Path, tmp_path: Path) -> None:
    copy_store(small_store, tmp_path)
    for name in ("x.part", "x.part-17"):
        (tmp_path / name).mkdir()
        np.zeros(100, np.uint16).tofile(tmp_path / name / "x.bin")
    assert json.loads(call("inspect", tmp_path, "--json").out)["documents"] == 160


def test_training_says_when_the_tokenizer_is_not_known(call, recipe, small_store: Path, tmp_path: Path) -> None:
    np.array(Store(small_store).tokens).tofile(tmp_path / "bare.bin")
    command = ["train", "-c", recipe, "train.steps=1", "--out"]
    done = call(*command, tmp_path / "r", f"data.path={tmp_path / 'bare.bin'}")
    assert "its tokenizer is not known; data.tokenizer names it" in done.out + done.err
    done = call(*command, tmp_path / "s")
    assert "tokenizer is not known" not in done.out + done.err


def test_a_pattern_that_matches_nothing(call, recipe, tmp_path: Path) -> None:
    err = call("train", "-c", recipe, "--out", tmp_path / "r", f"data.path={tmp_path}/shard_*.bin", expect=2).err
    assert f"{tmp_path}/shard_*.bin: no file matches this pattern" in err


def test_a_prefix_that_means_two_datasets(call, small_store: Path, tmp_path: Path) -> None:
    for name in ("paddle", "paddle-npz"):
        call("convert", small_store, tmp_path / "x", "--to", name)
    err = call("inspect", tmp_path / "x", expect=2).err
    assert "names 2 datasets" in err and "x_ids.npy (paddle)" in err and "Give the file you mean" in err
    assert "paddle-npz" in call("inspect", tmp_path / "x_ids.npz").out


def test_verify_of_a_run_and_its_checkpoints(call, finished: Path) -> None:
    printed = call("verify", finished).out
    assert printed.count("whole (step ") == 3 and "step 6;" in printed and "hashes agree" in printed
    step = finished / "checkpoints" / "step-00000006"
    (found,) = json.loads(call("verify", step, "--json").out)
    assert found["step"] == 6 and found["files"] > 2
    damaged = next((step / "portable").glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    for path in (step, finished):
        assert f"{damaged}: contents have changed" in call("verify", path, expect=2).err
