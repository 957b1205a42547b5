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
