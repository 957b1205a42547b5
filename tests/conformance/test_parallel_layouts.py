"""Layouts of the documents, started as a user starts them. Rows of the conformance list: S1-10, S1-13, S2-05, S3-02."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gptworks.cli.main import main
from gptworks.config import Layout, load, solve_batch
from gptworks.errors import ConfigError

BATCH = ["batch.global_size=8", "batch.micro_size=1"]
TINY = [
    *("model.num_layers=1", "model.hidden_size=16", "model.num_heads=2", "model.vocab_size=512"),
    *("model.max_positions=16", "data.split=90,10", "data.seq_len=16", "data.mask_eod=true", "train.steps=3"),
    *("train.log_every=1", "optim.lr=3e-3", "run.device=cpu", "run.threads=1", "checkpoint.portable=false"),
    "evaluate.every=0",
]


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def one_process(small_store: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    run = tmp_path_factory.mktemp("one") / "run"
    assert main(["train", *TINY, *BATCH, f"data.path={small_store}", "--out", str(run)]) == 0
    return losses(run)


@pytest.mark.slow
def test_s2_05_eight_processes_mp2_sharding4_equal_one(
    one_process: list[float], small_store: Path, tmp_path: Path, run_cli: Callable
) -> None:
    """The global batch is the same, and what each rank reads of it follows from the layout (S1-10)."""
    layout = ["parallel.tp=2", "parallel.fsdp=4", f"data.path={small_store}"]
    where = ["--out", tmp_path / "run", "--log-dir", tmp_path / "logs"]
    done = run_cli("train", "--nproc", "8", *TINY, *BATCH, *layout, *where)
    assert "batch: 8 samples of 16 tokens = 1 micro-batch x 2 accumulation x 4 data-parallel" in done.stdout
    assert losses(tmp_path / "run") == pytest.approx(one_process, abs=5e-6)
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert logs.keys() == {f"rank-{rank}.log" for rank in range(8)}
    assert "done: 3 steps." in logs["rank-0.log"]


@pytest.mark.parametrize(
    ("degrees", "world_size", "data_parallel"),
    [({"tp": 2, "pp": 4}, 8, 1), ({"tp": 2, "pp": 4, "dp": 4}, 32, 4), ({"tp": 2, "fsdp": 4, "dp": 2}, 16, 8)],
)
def test_s1_10_s1_13_world_and_accumulation_follow_from_the_degrees(
    degrees: dict[str, int], world_size: int, data_parallel: int
) -> None:
    config = load(overrides=["batch.global_size=64", "batch.micro_size=2", *_model_for(degrees)])
    layout = Layout.from_config(config.parallel)
    assert (layout.world_size, layout.data_parallel) == (world_size, data_parallel)
    plan = solve_batch(config.batch, layout.data_parallel)
    assert plan.global_size == plan.micro_size * data_parallel * plan.accumulation == 64


def test_s3_02_a_batch_that_the_degrees_do_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a multiple of") as caught:
        load(overrides=["batch.global_size=12", "batch.micro_size=1", *_model_for({"dp": 2, "fsdp": 4})])
    assert "Nearest: global_size=8 or 16." in str(caught.value)


def test_s3_02_degrees_whose_product_is_not_the_number_of_processes_are_refused(
    small_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = ["parallel.tp=2", "parallel.fsdp=4", f"data.path={small_store}"]
    assert main(["train", "--nproc", "4", *TINY, *BATCH, *layout, "--out", str(tmp_path / "run")]) == 2
    assert "fsdp=4 x tp=2 needs 8 ranks, but the world has 4. Fits: " in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def _model_for(degrees: dict[str, int]) -> list[str]:
    model = ["model.num_layers=4", "model.hidden_size=32", "model.num_heads=2"]
    return [*model, *(f"parallel.{axis}={size}" for axis, size in degrees.items())]
