"""Folders of datasets, as FleetX and PaddleNLP name them. Rows of the conformance list: S0-05, S2-03, S3-06, S4-01."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from gptworks.cli.main import main
from gptworks.config import DataConfig
from gptworks.data.dataset import Dataset
from gptworks.data.store import Store

TINY = [
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.num_heads=2",
    "model.max_positions=32",
    "data.seq_len=32",
    "batch.global_size=4",
    "batch.micro_size=4",
    "train.steps=3",
    "train.log_every=1",
    "evaluate.every=0",
    "run.device=cpu",
    "run.threads=1",
]


def trained(out: Path, *more: str) -> list[float]:
    assert main(["train", "--out", str(out), *TINY, *more]) == 0
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_s0_05_all_datasets_of_a_folder_are_used(small_store: Path, tmp_path: Path) -> None:
    """Sorted by name; none is left out, and each sample of each of them comes once in an epoch."""
    folder = tmp_path / "input_dir"
    tokens = np.array(Store(small_store).tokens)
    for name, part in (("b", slice(0, 3000)), ("a", slice(3000, 7000)), ("c", slice(7000, 9000))):
        folder.mkdir(exist_ok=True)
        np.save(folder / f"{name}_ids.npy", tokens[part])
        np.savez(folder / f"{name}_idx.npz", lens=np.full(10, (part.stop - part.start) // 10, np.int32))
    cfg = DataConfig(path=(str(folder),), seq_len=32, split=(1, 0, 0))
    dataset = Dataset(cfg, vocab_size=512)
    assert [store.file.name for store in dataset.stores] == ["a_ids.npy", "b_ids.npy", "c_ids.npy"]
    samples = dataset.samples("train")
    assert samples.per_epoch == 3999 // 32 + 2999 // 32 + 1999 // 32
    seen = {sample.tokens.tobytes() for sample in samples.at(0, samples.per_epoch)}
    for begin, end in ((3000, 7000), (0, 3000), (7000, 9000)):
        for start in range(begin, end - 32, 32):
            assert tokens[start : start + 33].astype(np.int64).tobytes() in seen
    assert len(trained(tmp_path / "run", f"data.path={folder}", "model.vocab_size=512")) == 3


def test_s2_03_the_ready_made_pair_in_a_folder_is_trained_on(small_store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    store = Store(small_store)
    np.save(folder / "gpt_en_dataset_300m_ids.npy", np.array(store.tokens))
    lens = np.diff(store.document_starts).astype(np.int32)
    np.savez(folder / "gpt_en_dataset_300m_idx.npz", lens=lens, docs=np.arange(len(lens) + 1))
    found = trained(tmp_path / "run", f"data.path={folder}", "model.vocab_size=512")
    assert found == trained(tmp_path / "run2", f"data.path={small_store}", "model.vocab_size=512")
    # The loader leaves its own indexes in the folder; they are not data.
    np.save(folder / "gpt_en_dataset_300m_gpt_train_indexmap_8ns_32sl_doc_idx.npy", np.arange(3))
    assert trained(tmp_path / "run3", f"data.path={folder}", "model.vocab_size=512") == found


def test_s2_03_a_pair_made_by_fleetx_is_trained_on(shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "fixtures" / "paddle" / "fleetx-gpt2-owt100"
    losses = trained(tmp_path / "run", f"data.path={folder}", "data.order=paddle", "data.tokenizer=gpt2")
    assert len(losses) == 3 and losses[0] == pytest.approx(np.log(50257), abs=0.5)


def test_s2_02_the_pair_equals_fleetxs_own_tools(shared_data: Path, tmp_path: Path) -> None:
    """Blanks around texts taken off, ends marked: the same bytes as FleetX's preprocess_data.py wrote."""
    folder = shared_data / "fixtures" / "paddle" / "fleetx-gpt2-owt100"
    command = ["prepare", str(folder / "owt100.jsonl"), "--out", str(tmp_path / "owt100"), "--format", "paddle"]
    assert main([*command, "--append-eod", "--strip"]) == 0
    for name in ("owt100_ids.npy", "owt100_idx.npz"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_s3_06_the_old_npz_is_trained_on(small_store: Path, tmp_path: Path) -> None:
    store = Store(small_store)
    lens = np.diff(store.document_starts).astype(np.uint16)
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "train.data.json_ids.npz", ids=np.array(store.tokens), lens=lens)
    found = trained(tmp_path / "run", f"data.path={tmp_path / 'data'}", "model.vocab_size=512")
    assert found == trained(tmp_path / "run2", f"data.path={small_store}", "model.vocab_size=512")


def test_s4_01_wikitext_to_mindrecord_and_a_run_on_it(tmp_path: Path, corpus_file: Path) -> None:
    (tmp_path / "wiki.train.tokens").write_text(
        "".join(f" \n = Title {i} = \n \n {text} \n" for i, text in enumerate(corpus_file.read_text().split("\n\n")))
    )
    folder = tmp_path / "records"
    command = ["prepare", str(tmp_path / "wiki.train.tokens"), "--out", str(folder / "wiki")]
    assert main([*command, "--format", "mindrecord", "--row-length", "33"]) == 0
    assert sorted(file.name for file in folder.iterdir()) == [
        "wiki.mindrecord",
        "wiki.mindrecord.db",
        "wiki.mindrecord.json",
    ]
    store = Store(folder / "wiki.mindrecord")
    assert set(store.contents.sizes.tolist()) == {33}
    text = store.load_tokenizer().decode(store.tokens[:33])
    assert " = Title 0 = " in text
    assert len(trained(tmp_path / "run", f"data.path={folder}", "model.vocab_size=50257")) == 3
    shutil.rmtree(folder)
