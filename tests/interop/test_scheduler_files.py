"""The models of Kubernetes' and Kubeflow's APIs and SkyPilot's parser take what we write. See `make test-interop`.

The files are those of tests/fixtures/schedulers, which the ordinary tests compare with what the command writes.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.interop

FILES = Path(__file__).parents[1] / "fixtures" / "schedulers"

# Each object into the class of its kind and back. A field that the class does not know is lost on the way, one of
# another type is changed or refused: what comes back must be what went in.
ROUND_TRIP = """
import json
import sys
from types import SimpleNamespace

import yaml
from kubeflow.training.api_client import ApiClient as Kubeflow
from kubeflow_trainer_api.models import TrainerV1alpha1TrainingRuntime, TrainerV1alpha1TrainJob
from kubernetes.client import ApiClient as Kubernetes

TRAINER = {"TrainJob": TrainerV1alpha1TrainJob, "TrainingRuntime": TrainerV1alpha1TrainingRuntime}
CLASSES = {
    "ConfigMap": (Kubernetes, "V1ConfigMap"),
    "Service": (Kubernetes, "V1Service"),
    "Job": (Kubernetes, "V1Job"),
    "PyTorchJob": (Kubeflow, "KubeflowOrgV1PyTorchJob"),
}


def returned(document):
    if document["kind"] in TRAINER:
        return TRAINER[document["kind"]].from_dict(document).to_dict()
    client, name = CLASSES[document["kind"]]
    client = client()
    return client.sanitize_for_serialization(client.deserialize(SimpleNamespace(data=json.dumps(document)), name))


documents = list(yaml.safe_load_all(open(sys.argv[1], encoding="utf-8")))
print(json.dumps([[document, returned(document)] for document in documents]))
"""

TASK = """
import json
import sys

import sky

task = sky.Task.from_yaml(sys.argv[1])
accelerators = sorted(pair for each in task.resources for pair in (each.accelerators or {}).items())
images = sorted({str(each.image_id) for each in task.resources})
mounts = {path: [storage.source, storage.mode.value] for path, storage in task.storage_mounts.items()}
print(json.dumps({"name": task.name, "nodes": task.num_nodes, "accelerators": accelerators, "images": images,
                  "mounts": mounts, "run": task.run, "setup": task.setup}))
"""


def ask(variable: str, program: str, file: Path, tmp_path: Path) -> Any:
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} is not set: the Python of an environment that has the packages (make test-interop)")
    environment = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    done = subprocess.run([python, "-c", program, str(file)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("file", sorted(path.name for path in FILES.glob("*.k8s.yaml")))
def test_the_models_of_the_api_give_back_every_field(file: str, tmp_path: Path) -> None:
    pairs = ask("GPTWORKS_KUBERNETES_PYTHON", ROUND_TRIP, FILES / file, tmp_path)
    assert {document["kind"] for document, _ in pairs} & {"Job", "PyTorchJob", "TrainJob"}
    for document, returned in pairs:
        assert returned == document


def test_a_field_of_another_name_would_be_found(tmp_path: Path) -> None:
    fields = {"job": "completions", "pytorchjob": "nprocPerNode", "trainjob": "backoffLimit"}
    for file, field in fields.items():
        text = (FILES / f"{file}.k8s.yaml").read_text(encoding="utf-8")
        assert f"  {field}: " in text
        (tmp_path / "wrong.yaml").write_text(text.replace(f"  {field}: ", f"  {field}s: "), encoding="utf-8")
        pairs = ask("GPTWORKS_KUBERNETES_PYTHON", ROUND_TRIP, tmp_path / "wrong.yaml", tmp_path)
        assert any(returned != document for document, returned in pairs)


def test_skypilot_reads_the_task(tmp_path: Path) -> None:
    task = ask("GPTWORKS_SKYPILOT_PYTHON", TASK, FILES / "rented.sky.yaml", tmp_path)
    assert (task["name"], task["nodes"]) == ("run", 2)
    assert task["accelerators"] == [["A100", 8], ["A100-80GB", 8], ["H100", 8]], "a V100 has no units for bf16"
    assert "docker:gptworks:cuda" in task["images"][0] and task["mounts"] == {"/data": ["s3://b", "MOUNT"]}
    assert '--node-rank "$SKYPILOT_NODE_RANK"' in task["run"]
    one = ask("GPTWORKS_SKYPILOT_PYTHON", TASK, FILES / "one.sky.yaml", tmp_path)
    assert (one["nodes"], one["accelerators"]) == (1, [["H100", 8]])
    assert one["setup"] == "pip install ./gptworks\n" and "--nnodes" not in one["run"]
