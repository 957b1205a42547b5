"""FleetX's own YAML, translated and planned. Row of the conformance list: S0-19."""

import json
from pathlib import Path

import pytest

from gptworks.cli.main import main

FLEETX = Path(__file__).parents[2] / "recipes" / "foreign" / "fleetx"


@pytest.mark.parametrize(
    ("name", "half"), [("configs_345m_single_card.yaml", 512), ("configs_1.3B_single_card.yaml", 1024)]
)
def test_s0_19_fleetx_yaml_on_a_16_gb_card(
    name: str, half: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["translate", str(FLEETX / name)]) == 0
    ours = tmp_path / "ours.yaml"
    ours.write_text(capsys.readouterr().out)

    def plan(*more: str) -> dict:
        assert main(["plan", "--json", "-c", str(ours), "--device", "v100-16g", *more]) == 0
        return json.loads(capsys.readouterr().out)

    told = plan()
    for change in told["changes"]:
        said = [f"{key}={value}" for key, value in change["settings"].items()]
        assert plan(*said, "--devices", str(change["devices"]))["needed"] == change["needed"] < 16e9
    assert told["fits"] or told["changes"]
    assert plan(f"model.hidden_size={half}", f"model.ffn_size={4 * half}")["needed"] < 16e9


@pytest.mark.slow
@pytest.mark.parametrize(("name", "published"), [("345m", 30.9), ("1.3B", 26.0)])
def test_s0_19_fleetx_yaml_under_fleetx_rules(
    name: str, published: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["translate", str(FLEETX / f"configs_{name}_single_card.yaml")]) == 0
    ours = tmp_path / "ours.yaml"
    ours.write_text(capsys.readouterr().out)
    asked = ["plan", "--rules", "fleetx", "-c", str(ours), "--device", "v100-32g"]
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["needed"] / 2**30 == pytest.approx(published, rel=0.10)
    assert told["needed"] == pytest.approx(sum(told["parts"].values()) * 2**20)
    for setting, refused in (
        ("precision.compute=bf16", "--rules fleetx: got precision.compute=bf16"),
        ("train.recompute=full_attn", "--rules fleetx: got train.recompute=full_attn; its rules are known for none"),
    ):
        assert main([*asked, setting]) == 2
        assert refused in capsys.readouterr().err
    assert main([*asked[:-1], "h100-80g"]) == 2
    assert "--rules fleetx: got --device h100-80g; its rules are known for v100-16g" in capsys.readouterr().err


def test_the_same_layout_under_each_systems_rules(capsys: pytest.CaptureFixture[str]) -> None:
    shape = [
        "--preset",
        "tiny",
        "precision.compute=fp16",
        "train.recompute=full",
        "parallel.tp=2",
        "batch.micro_size=2",
    ]
    found = {}
    for system in ("fleetx", "megatron", "oneflow"):
        assert main(["plan", "--rules", system, "--device", "v100-16g", *shape]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"{system} would take ") and "context" in said
        found[system] = said.split()[3]
    assert len(set(found.values())) > 1
