"""data.order: paddle beside functions of PaddleNLP (tests/fixtures/orders) and beside its rules, written as loops."""

import itertools
import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gptworks.config import DataConfig
from gptworks.data import split
from gptworks.data.foreign_order import build_samples
from gptworks.errors import DataError

FOLDER = Path(__file__).parents[1] / "fixtures" / "orders"
MADE = json.loads((FOLDER / "paddle_orders.json").read_text())
COMPARED = runpy.run_path(str(FOLDER / "check.py"))


def config(seq_len: int, shares: str) -> DataConfig:
    return DataConfig(order="paddle", seq_len=seq_len, split=shares)


@pytest.mark.parametrize("name", MADE["stores"])
def test_the_tables_are_paddlenlps(name: str, tmp_path: Path) -> None:
    store = COMPARED["write_store"](tmp_path / "store", 0, MADE["stores"][name])
    apart = set()
    for case in MADE["cases"]:
        if case["store"] != name:
            continue
        cfg = config(case["seq_len"], case["split"])
        assert split.boundaries(cfg.split, len(store.contents.sizes)) == case["borders"]
        for part, asked, tables in zip(split.SPLITS, case["asked"], case["tables"], strict=True):
            if tables is None:
                with pytest.raises(DataError, match=f"the {part} split has"):
                    build_samples([store], part, cfg, case["seed"], asked)
                continue
            (source,) = build_samples([store], part, cfg, case["seed"], asked).sources
            found = (source.document_index, source.sample_index, source.shuffle_index)
            assert [COMPARED["digest"](table) for table in found] == tables
            apart.add(source.last_apart)
    assert apart == {True, False}


def samples_by_loops(documents: list[list[int]], seq_len: int, seed: int, asked: int) -> list[list[int]]:
    """The rules of 2022, one token after another: documents in order, epoch after epoch, only the windows shuffled."""
    once = [token for document in documents for token in document]
    epochs = 1
    while (epochs * len(once) - 1) // seq_len < asked:
        epochs += 1
    row = once * epochs
    windows = []
    while len(windows) * seq_len + seq_len + 1 <= len(row):
        windows.append(row[len(windows) * seq_len : (len(windows) + 1) * seq_len + 1])
    in_all_but_last = ((epochs - 1) * len(once) - 1) // seq_len if epochs > 1 else len(windows)
    needed_of_last = asked - in_all_but_last
    together = len(windows)
    if epochs > 1 and needed_of_last < int(0.8 * ((len(once) - 1) // seq_len)):
        together = in_all_but_last
    draws = np.random.RandomState(seed)
    order = []
    for numbers in (list(range(together)), list(range(together, len(windows)))):
        if numbers:
            draws.shuffle(numbers)
        order += numbers
    return [windows[number] for number in order[:asked]]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_the_samples_follow_the_rules(tmp_path: Path, data: st.DataObject) -> None:
    lengths: list[int] = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=12))
    seq_len, seed = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 2**32 - 1))
    asked = data.draw(st.integers(1, 120))
    store = COMPARED["write_store"](tmp_path / "store", 0, lengths)
    cfg = config(seq_len, "1,0,0")
    if sum(lengths) <= seq_len:
        with pytest.raises(DataError, match="one sample needs"):
            build_samples([store], "train", cfg, seed, asked)
        return
    starts = np.cumsum([0, *lengths])
    tokens: Any = store.tokens[: starts[-1]].tolist()
    documents = [tokens[begin:end] for begin, end in itertools.pairwise(starts)]
    samples = build_samples([store], "train", cfg, seed, asked)
    found = [sample.tokens.tolist() for sample in samples.at(0, asked)]
    assert found == samples_by_loops(documents, seq_len, seed, asked)
    assert samples.per_epoch == (sum(lengths) - 1) // seq_len


def test_documents_are_not_shuffled_as_megatron_shuffles_them(tmp_path: Path) -> None:
    store = COMPARED["write_store"](tmp_path / "store", 0, [30] * 40)
    paddle = build_samples([store], "train", config(8, "1,0,0"), 5, 200).sources[0]
    megatron = build_samples([store], "train", DataConfig(order="megatron", seq_len=8, split=(1.0,)), 5, 200).sources[0]
    assert paddle.document_index.tolist() == [*range(40)] * 2
    assert sorted(megatron.document_index.tolist()) == sorted(paddle.document_index.tolist())
    assert megatron.document_index.tolist() != paddle.document_index.tolist()
