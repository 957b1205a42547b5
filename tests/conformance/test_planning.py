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


def test_s0_19_345m_fits_16_gb_as_it_is_and_with_half_the_hidden_size(plan: Plan) -> None:
    """The fused attention kernel keeps no attention matrices; FleetX, which does, needs 30.9 GB."""
    file = ("-c", str(RECIPES / "345m.yaml"), *ON_16_GB)
    assert plan(*file)["needed"] < CARD
    assert plan(*file, "model.hidden_size=512")["needed"] < CARD
    written_out = plan(*file, "model.attention=math")
    assert not written_out["fits"]
    assert_changes_help(written_out, (*file, "model.attention=math"), plan)
    assert written_out["changes"][0]["settings"] == {"model.attention": "auto"}


def test_s0_19_1_3b_is_given_a_change_and_half_the_hidden_size_fits_too(plan: Plan) -> None:
    file = ("-c", str(RECIPES / "1.3b.yaml"), *ON_16_GB)
    told = plan(*file)
    assert told["fits"] is False and told["needed"] > CARD
    assert_changes_help(told, file, plan)
    assert told["changes"][0]["kind"] == "devices" and told["changes"][0]["devices"] == 2
    assert plan(*file, "model.hidden_size=1024")["needed"] < CARD
    assert 1024 in [change["settings"].get("model.hidden_size") for change in told["changes"]], "it is proposed too"


def assert_changes_help(told: dict[str, Any], file: tuple[str, ...], plan: Plan) -> None:
    assert any(change["kind"] != "model" for change in told["changes"])
    for change in told["changes"]:
        mended = plan(*file, *settings(change), "--devices", str(change["devices"]))
        assert mended["fits"] and mended["needed"] == change["needed"] < CARD
        assert mended["settings"]["batch.global_size"] == 8, "the batch is kept"


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
    # Two ways to the same bytes: the closed form, and parts built by the code of training (`weights`, in GiB).
    rows = [line.split() for line in said.splitlines() if "  0-7  " in line]
    weights = [float(row[-8]) for row in rows]
    stages = [told["stages"][number]["parameters"] / 2**30 for number in (0, 7, 15)]
    assert weights == pytest.approx(stages, abs=0.01)


@pytest.mark.parametrize("preset", ["1.3B", "2.7B", "6.7B", "13B", "175B"])
def test_s3_07_every_preset_has_a_plan(preset: str, plan: Plan) -> None:
    layout = ["parallel.pp=8", "parallel.tp=8", "parallel.fsdp=4", "batch.global_size=256", "batch.micro_size=1"]
    told = plan("--preset", preset, "--device", "a100-80g", "precision.compute=bf16", *layout)
    assert told["devices"] == 256 and told["fits"] and told["tokens_per_second"] > 0
