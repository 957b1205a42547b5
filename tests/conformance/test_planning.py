"""What the documents say of memory, planned. Rows of the conformance list: S0-19, S3-07."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptworks.cli.main import main

RECIPES = Path(__file__).parents[2] / "recipes"
CARD = 16e9  # bytes: the label of the card, of which torch sees a little more
Plan = Callable[..., dict[str, Any]]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    def ask(*args: str) -> dict[str, Any]:
        assert main(["plan", "--json", *args]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return ask


def settings(change: dict[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in change["settings"].items()]


ON_16_GB = ("--device", "v100-16g")


@pytest.mark.parametrize(
    ("recipe", "half", "written_out"),
    [("345m.yaml", 512, ["model.attention=math"]), ("1.3b.yaml", 1024, [])],
)
def test_s0_19_a_change_and_half_the_hidden_size_fit_16_gb(
    recipe: str, half: int, written_out: list[str], plan: Plan
) -> None:
    """345M with attention written out, as FleetX computes it; with the fused kernel it fits as it is."""
    file = ("-c", str(RECIPES / recipe), *ON_16_GB, *written_out)
    told = plan(*file)
    assert told["fits"] is False and told["needed"] > CARD
    proposed = [change for change in told["changes"] if change["kind"] != "model"]
    assert proposed
    for change in proposed:
        mended = plan(*file, *settings(change), "--devices", str(change["devices"]))
        assert mended["fits"] and mended["needed"] == change["needed"] < CARD
        assert mended["settings"]["batch.global_size"] == 8, "the batch is kept"
    documents = plan(*file, f"model.hidden_size={half}")
    assert documents["fits"] and documents["needed"] < CARD
    assert half in [change["settings"].get("model.hidden_size") for change in told["changes"]], "it is proposed too"


def test_s0_19_the_recipes_fit_the_card_they_were_published_for(plan: Plan) -> None:
    for recipe in ("345m.yaml", "1.3b.yaml"):
        assert plan("-c", str(RECIPES / recipe), "--device", "v100-32g")["fits"]


GPT3 = ["model.max_positions=2048", "data.seq_len=2048", "batch.global_size=1536", "batch.micro_size=1"]
GPT3 += ["parallel.pp=16", "parallel.tp=8", "precision.compute=bf16"]


def test_s3_07_gpt3_on_tp8_pp16_is_planned_and_dry_run(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    told = plan("--preset", "175B", "--device", "a100-80g", *GPT3)
    assert told["devices"] == 128 and told["parameters"] == 174_615_846_912 and len(told["stages"]) == 16
    assert main(["train", "--dry-run", "--preset", "175B", *GPT3]) == 0
    said = capsys.readouterr().out
    assert "pp16.tp8: 128 processes" in said and "174,615,846,912" in said
    # Two ways to the same bytes: the closed form, and parts built by the code of training. `weights` is a column of GiB.
    rows = [line.split() for line in said.splitlines() if "each" in line or line.lstrip().startswith(("0 ", "15 "))]
    weights = [float(row[-5]) for row in rows]
    stages = [told["stages"][number]["parameters"] / 2**30 for number in (0, 7, 15)]
    assert weights == pytest.approx(stages, abs=0.01)


@pytest.mark.parametrize("preset", ["1.3B", "2.7B", "6.7B", "13B", "175B"])
def test_s3_07_every_preset_has_a_plan(preset: str, plan: Plan) -> None:
    told = plan("--preset", preset, "--devices", "256", "--device", "a100-80g", "precision.compute=bf16")
    assert told["fits"] and told["tokens_per_second"] > 0
