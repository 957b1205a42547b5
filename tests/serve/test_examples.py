"""The Dockerfile, the compose file and the systemd unit start what exists, where it is reached, and let it finish.

None of them was run here; what they say is read as Docker and systemd read it, and given to the real command line.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from gptworks.cli.main import build_parser
from gptworks.serve import http_server

ROOT = Path(__file__).resolve().parents[2]


def of_dockerfile() -> list[str]:
    (line,) = (line for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("CMD "))
    return list(json.loads(line.removeprefix("CMD ")))


def of_compose() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "recipes/serve/compose.yaml").read_text())["services"]["gptworks"])


def of_unit() -> dict[str, str]:
    text = (ROOT / "recipes/serve/gptworks.service").read_text().replace("\\\n", " ")
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))


@pytest.mark.parametrize("file", ["dockerfile", "compose", "unit"])
def test_the_command_of_an_example_is_one(file: str) -> None:
    commands = {"dockerfile": of_dockerfile, "compose": lambda: of_compose()["command"]}
    words = commands[file]() if file in commands else shlex.split(of_unit()["ExecStart"])
    assert Path(words[0]).name == "gptworks" and words[1] == "serve"
    args, unknown = build_parser().parse_known_args(words[1:])
    assert not unknown and args.model and args.port == 8000
    http_server.require_safe(args.host, has_keys=bool(args.api_key), is_open=args.open)  # it would start


def test_what_runs_may_finish_before_it_is_killed() -> None:
    usual = build_parser().parse_args(["serve", "--model", "x"]).timeout
    assert int(of_unit()["TimeoutStopSec"]) > usual and of_unit()["KillSignal"] == "SIGTERM"
    assert int(re.fullmatch(r"(\d+)s", of_compose()["stop_grace_period"])[1]) > usual  # type: ignore[index]


def test_the_container_is_reached_and_asked_for_its_health_where_it_listens() -> None:
    compose = of_compose()
    assert compose["ports"] == ["127.0.0.1:8000:8000"]
    assert "http://127.0.0.1:8000/health" in compose["healthcheck"]["test"][-1]
    assert (ROOT / "recipes/serve" / compose["build"] / "Dockerfile").is_file()
    key_file = compose["command"][compose["command"].index("--api-key") + 1]
    assert key_file == f"/run/secrets/{compose['secrets'][0]}"
