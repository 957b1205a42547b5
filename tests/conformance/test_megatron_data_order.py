"""Megatron's samples and the split by documents. Rows of the conformance list: S1-03 and S0-06."""

import json
import runpy
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from gptworks.cli.main import main
from gptworks.data import split
from gptworks.data.store import Store

FOLDER = Path(__file__).parents[1] / "fixtures" / "orders"
MEGATRON = json.loads((FOLDER / "megatron_orders.json").read_text())
PADDLE = json.loads((FOLDER / "paddle_orders.json").read_text())

MODEL = ["model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.vocab_size=512"]
RUN = [*MODEL, "model.max_positions=16", "data.seq_len=16", "batch.global_size=4", "run.device=cpu"]


@pytest.mark.parametrize("split_text", ["949,50,1", "969,30,1", "80,10,10"])
def test_s1_03_samples_are_megatrons(split_text: str, tmp_path: Path) -> None:
    """Seeds, lengths, one epoch and several, with the last one apart or not: what megatron-core itself answered."""
    check = runpy.run_path(str(FOLDER / "check.py"))["check"]
    cases = [case for case in MEGATRON["cases"] if case["split"] == split_text and len(case["stores"]) == 1]
    assert len(cases) >= 25
    for case in cases:
        check(case, MEGATRON["stores"], tmp_path)


def test_s1_03_the_order_is_chosen_in_the_configuration(small_store: Path, run_cli) -> None:
    """The first batch of the command line is the one of the tables, which are megatron-core's."""
    from gptworks.config import DataConfig
    from gptworks.data.foreign_order import build_samples

    options = [*RUN, f"data.path={small_store}", "train.steps=50", "train.seed=77", "data.split=90,10"]
    shown = run_cli("train", "--dry-run", "--show-batch", *options, "data.order=megatron").stdout
    cfg = DataConfig(order="megatron", seq_len=16, split="90,10")
    store = Store(small_store)
    tokenizer = store.load_tokenizer()
    assert tokenizer is not None
    for sample in build_samples([store], "train", cfg, 77, 50 * 4).at(0, 4):
        assert tokenizer.decode(sample.tokens[:-1].tolist()) in shown


@pytest.mark.parametrize("number", [10, 50, 69, 1990])
@pytest.mark.parametrize("shares", ["949,50,1", "969,30,1", "80,10,10"])
def test_s0_06_borders_of_both_rules(number: int, shares: str) -> None:
    """Those PaddleNLP and megatron-core came to."""
    (paddle,) = {
        tuple(case["borders"])
        for case in PADDLE["cases"]
        if case["split"] == shares and len(PADDLE["stores"][case["store"]]) == number
    }
    assert split.boundaries([float(share) for share in shares.split(",")], number) == list(paddle)
    cases = [
        case
        for case in MEGATRON["cases"]
        if case["split"] == shares and [len(MEGATRON["stores"][name]) for name in case["stores"]] == [number]
    ]
    borders = split.core_boundaries([float(share) for share in shares.split(",")], number)
    assert cases and borders[0] == 0 and borders[-1] == number
    for case in cases:
        ranges = [part["sequences"][0] if "blend" in part else part["sequences"] for part in case["answer"]]
        expected = [[b, e] if b < e else None for b, e in pairwise(borders)]
        assert ranges == expected


# With 160 documents the two rules put the first border elsewhere: the held-out part tells them apart.
SHARES = "905,60,35"
BORDERS = {"shuffled": (144, 154, 160), "paddle": (144, 154, 160), "megatron": (145, 154, 160)}


@pytest.mark.slow
@pytest.mark.parametrize("order", BORDERS)
def test_s0_06_the_third_part_is_evaluated(
    order: str, small_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    options = [*RUN, f"data.path={small_store}", "train.steps=2", f"data.split={SHARES}", f"data.order={order}"]
    assert main(["train", "--out", str(out), *options]) == 0
    evaluate = ["eval", "--model", str(out), "--task", "heldout", "--data", str(small_store)]
    starts = Store(small_store).document_starts
    begin, border, end = BORDERS[order]
    for part, tokens in (("held-out", starts[border] - starts[begin]), ("test", starts[end] - starts[border])):
        capsys.readouterr()
        assert main([*evaluate, "--split", part, "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["tokens"] == (tokens - 1) // 16 * 16
        assert np.isfinite(result["rows"][0]["loss"])
    if order != "shuffled":
        assert main([*evaluate, "--baselines"]) == 2
        assert f"data.order: {order}" in capsys.readouterr().err
