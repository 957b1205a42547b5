"""run.track with the real packages, offline or local. `make .venv-trackers/installed` makes an environment for them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.interop
ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("GPTWORKS_TRACKERS_PYTHON", ROOT / ".venv-trackers" / "bin" / "python"))


@pytest.fixture(scope="module", params=["wandb", "mlflow", "trackio"])
def tracker(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if not PYTHON.exists() or subprocess.run([PYTHON, "-c", f"import {name}"], capture_output=True).returncode:
        pytest.skip(f"{name} is not installed in {PYTHON.parent.parent}: make .venv-trackers/installed")
    return name


def in_that_python(code: str, folder: Path, **more: str) -> str:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *(path for path in sys.path if "site-packages" in path)]),
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
        "TRACKIO_DIR": str(folder / "trackio"),
        "HF_HUB_OFFLINE": "1",
        **more,
    }
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, env=env, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
    return done.stdout


TRAIN = """
import sys, warnings
warnings.simplefilter("ignore")
import gptworks
from gptworks.train import loop
steps, store, out, name, resume = sys.argv[1:] if len(sys.argv) > 1 else {arguments}
config = gptworks.load_config(overrides=[
    "model.num_layers=1", "model.hidden_size=16", "model.num_heads=2", "model.vocab_size=512", "model.max_positions=16",
    "data.split=90,10", "data.seq_len=16", "batch.global_size=4", f"train.steps={steps}", "optim.decay_steps=6",
    "train.log_every=1", "evaluate.every=0", "run.device=cpu", "run.threads=1", f"data.path={store}", f"run.out={out}",
    f"run.track=[{name}]", "run.project=ours",
])
loop.train(config, resume_from=resume, observers=[{observer}])
"""
BREAK = {  # what a user or a disk may do to it while the run goes on
    "wandb": "__import__('wandb').finish()",
    "mlflow": "open('mlflow.db', 'wb').write(b'no database ' * 1000)",
    "trackio": "__import__('trackio').finish()",
}
READ = {
    "mlflow": """
import json
from mlflow.tracking import MlflowClient
client = MlflowClient()
(experiment,) = [each for each in client.search_experiments() if each.name == "ours"]
runs = client.search_runs([experiment.experiment_id])
loss = [[each.step, each.value] for each in client.get_metric_history(runs[0].info.run_id, "loss")]
print(json.dumps({"runs": len(runs), "loss": loss, "config": runs[0].data.params["train.seed"],
                  "environment": runs[0].data.tags["environment.python"], "status": runs[0].info.status}))
""",
    "trackio": """
import json, trackio
runs = trackio.Api().runs("ours")
(run,) = list(runs)
lines = run.history() if hasattr(run, "history") else None
if lines is None:
    from trackio.sqlite_storage import SQLiteStorage
    lines = SQLiteStorage.get_logs("ours", run.name)
config = run.config
print(json.dumps({"runs": 1, "loss": [[each["step"], each["loss"]] for each in lines],
                  "config": str(config["train"]["seed"]), "environment": config["environment"]["python"]}))
""",
    "wandb": """
import glob, json, struct
from wandb.proto import wandb_internal_pb2 as messages

def records(data):
    # A log as LevelDB has it: seven bytes for the file, then blocks of 32 KiB, in which a record may begin (1, 2),
    # go on (3) and end (4; 1 is both). wandb has no reader of its own in Python any more.
    assert data[:4] == b":W&B"
    at, record = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if kind == 0:
            at += 32768 - at % 32768
            continue
        piece, at = data[at + 7 : at + 7 + length], at + 7 + length
        record = piece if kind in (1, 2) else record + piece
        if kind in (1, 4):
            yield record

loss, ids, config = [], set(), {}
for file in sorted(glob.glob("run/wandb/offline-run-*/run-*.wandb")):
    for data in records(open(file, "rb").read()):
        record = messages.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            ids.add(record.run.run_id)
            config |= {each.key: json.loads(each.value_json) for each in record.run.config.update}
        if record.WhichOneof("record_type") == "history":
            line = {each.key or ".".join(each.nested_key): json.loads(each.value_json) for each in record.history.item}
            loss.append([line["step"], line["loss"]])
print(json.dumps({"runs": len(ids), "loss": loss, "config": str(config["train"]["seed"]),
                  "environment": config["environment"]["python"]}))
""",
}


def test_a_resumed_run_is_one_run_there(tracker: str, tmp_path: Path, small_store: Path) -> None:
    run = tmp_path / "run"
    for steps, resume in (("4", "never"), ("6", "auto")):
        arguments: Any = (steps, str(small_store), str(run), tracker, resume)
        in_that_python(TRAIN.replace("{arguments}", repr(arguments)).replace("{observer}", ""), tmp_path)
    found = json.loads(in_that_python(READ[tracker], tmp_path).splitlines()[-1])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert found["runs"] == 1
    assert dict(map(tuple, found["loss"])) == pytest.approx({line["step"]: line["loss"] for line in lines})
    assert found["config"] == "1234" and found["environment"].startswith("3.")


def test_one_that_breaks_in_the_middle_is_told_once_and_training_goes_on(
    tracker: str, tmp_path: Path, small_store: Path
) -> None:
    arguments: Any = ("6", str(small_store), str(tmp_path / "run"), tracker, "never")
    observer = f"lambda line: line['step'] == 3 and {BREAK[tracker]}"
    code = TRAIN.replace("{arguments}", repr(arguments)).replace("{observer}", observer)
    printed = in_that_python(code, tmp_path)
    assert printed.count(f"run.track: {tracker} failed and gets nothing more from this run: ") == 1
    assert "done: 6 steps" in printed and "Traceback" not in printed
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
