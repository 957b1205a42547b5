"""gptworks launch --image: the command line of docker or podman, shown and run."""

import os
import shlex
import stat
from pathlib import Path

import pytest

from gptworks.cli.main import main
from gptworks.launch.container import Container

ROOT = Path(__file__).parents[2]


def test_s1_08_dry_run_prints_the_exact_docker_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    options = ["--engine", "docker", "--gpus", "all", "--mount", "data", "--env", "NCCL_DEBUG=INFO", "--dry-run"]
    assert main(["launch", "--image", "gptworks:cuda", *options, "--", "gptworks", "train", "-c", "a b.yaml"]) == 0
    here = tmp_path.resolve()
    assert shlex.split(capsys.readouterr().out) == [
        "docker", "run", "--rm", "--network", "host", "--shm-size", "8g", "--gpus", "all",
        "--user", f"{os.getuid()}:{os.getgid()}", "-e", "HOME=/tmp", "-e", "NCCL_DEBUG=INFO",
        "-v", f"{here}:{here}", "-v", f"{here}/data:{here}/data", "-w", str(here),
        "gptworks:cuda", "gptworks", "train", "-c", "a b.yaml",
    ]  # fmt: skip


def test_podman_has_words_of_its_own(tmp_path: Path) -> None:
    words = Container("i", ["x"], gpus="0,1", folder=tmp_path, has_terminal=True).command_line("podman")
    assert words[:7] == ["podman", "run", "--rm", "--network", "host", "--shm-size", "8g"]
    assert words[7:13] == ["-i", "-t", "--device", "nvidia.com/gpu=0", "--device", "nvidia.com/gpu=1"]
    assert words[13:15] == ["--userns", "keep-id"] and words[-2:] == ["i", "x"]
    docker = Container("i", ["x"], gpus="0,1", folder=tmp_path).command_line("docker")
    assert docker[docker.index("--gpus") + 1] == '"device=0,1"'  # docker reads a list itself; the quotes keep it whole


def test_a_command_in_a_command_keeps_its_own_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    inner = ["gptworks", "run", "--device", "cpu", "--", "python", "train.py"]
    assert main(["launch", "--image", "i", "--gpus", "none", "--dry-run", "--", *inner]) == 0
    assert shlex.split(capsys.readouterr().out)[-7:] == inner


def test_the_exit_code_is_that_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "podman").write_text("#!/bin/sh\nexit 7\n", encoding="utf-8")
    (tmp_path / "podman").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(tmp_path))  # no docker: podman is taken
    assert main(["launch", "--image", "i", "--", "true"]) == 7


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--image", "i"], "no command"),
        (["--image", "i", "--mount", "nowhere", "--", "x"], "nowhere is not a folder"),
        (["--image", "i", "--server-ip", "1.2.3.4", "--", "x"], "--server-ip: not with --image"),
        (["--image", "i", "--", "x"], "neither docker nor podman"),
        (["--image", "i", "--engine", "podman", "--", "x"], "--engine podman: is not on PATH"),
        (["--make-rank-table", "[0,8]", "--gpus", "all"], "--gpus: only with --image"),
    ],
)
def test_mistakes_are_answered(
    words: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("file", ["Dockerfile", "Dockerfile.cuda"])
def test_the_dockerfiles_copy_what_exists(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    copied = [name for line in text.splitlines() if line.startswith("COPY ") for name in line.split()[1:-1]]
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {"pyproject.toml", "src"} <= set(copied) and all((ROOT / name).exists() for name in copied)
    assert not set(copied) & set(ignored)
