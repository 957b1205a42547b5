"""Manifests for Kubernetes: an indexed Job, which needs nothing more, or a PyTorchJob or TrainJob of Kubeflow."""

import signal
from pathlib import Path
from typing import Any

from gptworks.errors import TRY_AGAIN, GPTWorksError, UsageError
from gptworks.launch.nodes import PORT
from gptworks.launch.schedulers import yaml_document
from gptworks.launch.schedulers.job import ClusterJob, require_stored, require_working_time

SUFFIX = ".k8s.yaml"
OPTIONS = frozenset({"kind"})
KINDS = ("job", "pytorchjob", "trainjob")

_CONFIG_FOLDER, _CONFIG_FILE = "/etc/gptworks", "run.yaml"
_STOPPED = 128 + signal.SIGTERM  # exit code of a run that was told to end before it was done, and has saved

_TRAINER = "trainer.kubeflow.org/v1alpha1"

# Number of the pod, and where the first one is, as both of Kubeflow's operators tell them.
_OF_TORCHRUN = ("$(PET_NODE_RANK)", "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)")

Object = dict[str, Any]


def check(job: ClusterJob) -> None:
    if job.kind not in KINDS:
        raise UsageError(f"--kind: {job.kind!r} is not known. Needed: {', '.join(KINDS)}.")
    if not job.image:
        raise UsageError(
            "--image: not given, and pods are made of one. Needed: an image with gptworks (see Dockerfile)."
        )
    if not job.volumes:
        raise UsageError(
            "--volume: not given, and what a pod writes goes with it. Needed: CLAIM:/PATH, a PersistentVolumeClaim "
            "that all pods may write to (ReadWriteMany), for data and checkpoints."
        )
    require_working_time(job)
    require_stored(job)


def render(job: ClusterJob) -> str:
    made = {"job": _indexed_job, "pytorchjob": _pytorch_job, "trainjob": _train_job}[job.kind](job)
    return job.comments + "---\n".join(yaml_document.dump(document) for document in [_config_map(job), *made])


def submit_words(job: ClusterJob, path: Path) -> list[str]:
    return ["kubectl", "apply", "-f", str(path)]


# What they share


def _config_map(job: ClusterJob) -> Object:
    named = {"metadata": {"name": f"{job.name}-config"}}
    return {"apiVersion": "v1", "kind": "ConfigMap", **named, "data": {_CONFIG_FILE: job.config}}


def _command(job: ClusterJob, node_rank: str, master: str) -> list[str]:
    """The command of one pod, which is one node. Kubernetes fills in $(NAME), from the variables of the pod."""
    words = [*job.train_words("-c", f"{_CONFIG_FOLDER}/{_CONFIG_FILE}"), *job.launcher_words(node_rank, master)]
    return [*words, "--stopped-code", str(_STOPPED)]  # 0 would be taken for the end of the training


def _volumes(job: ClusterJob) -> tuple[list[Object], list[Object]]:
    """The volumes of the pod, and where its container sees them."""
    volumes: list[Object] = [
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "config", "configMap": {"name": f"{job.name}-config"}},
    ]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "config", "mountPath": _CONFIG_FOLDER}]
    for number, volume in enumerate(job.volumes):
        name = f"volume-{number}"
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": volume.source}})
        mounts.append({"name": name, "mountPath": volume.path})
    return volumes, mounts


def _resources(job: ClusterJob) -> Object:
    if job.machine.has_gpus:
        return {"limits": {"nvidia.com/gpu": str(job.machine.processes)}}
    return {"requests": {"cpu": str(job.machine.processes)}}


def _pod(job: ClusterJob, container: str, command: list[str]) -> Object:
    volumes, mounts = _volumes(job)
    return {
        "terminationGracePeriodSeconds": job.grace,  # from SIGTERM, which makes the ranks save
        "containers": [
            {
                "name": container,
                "image": job.image,
                "command": command,
                "workingDir": job.volumes[0].path,
                "resources": _resources(job),
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }


def _limits(job: ClusterJob) -> Object:
    return {} if job.working_time is None else {"activeDeadlineSeconds": job.working_time}


def _failures(job: ClusterJob) -> Object:
    """The failure policy of a Kubernetes Job: which exit codes are tried again, and which of these are counted."""
    rules = [
        # A mistake that has to be mended. All else is tried again, and counted by backoffLimit, but for a run that has
        # saved because one of its pods was told to end, and nodes that were drained.
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [GPTWorksError.exit_code]}},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [_STOPPED]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    return {"backoffLimit": job.machine.nodes * job.max_restarts, "podFailurePolicy": {"rules": rules}}


def _never_restarted(pod: Object) -> Object:
    """But replaced: only so does Kubernetes look at the exit code."""
    return {"restartPolicy": "Never", **pod}


# The kinds


def _indexed_job(job: ClusterJob) -> list[Object]:
    """Pod K of the Job is node K; a headless service gives it the name NAME-K.NAME."""
    nodes = job.machine.nodes
    command = _command(job, "$(JOB_COMPLETION_INDEX)", f"{job.name}-0.{job.name}:{PORT}")
    pod = {"subdomain": job.name, **_never_restarted(_pod(job, "train", command))}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name},
        # Pods ask for each other's names before all of them are ready.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": job.name}},
    }
    many = {"completionMode": "Indexed", "completions": nodes, "parallelism": nodes}
    spec = {**many, **_limits(job), **_failures(job), "template": {"spec": pod}}
    made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job.name}, "spec": spec}
    return [service, made] if nodes > 1 else [made]


def _pytorch_job(job: ClusterJob) -> list[Object]:
    """The operator numbers the pods and says where the first one is, by variables that are meant for torchrun."""
    nodes = job.machine.nodes
    # By `ExitCode` 1 to 127 are for good; a pod that was killed or stopped has 128 or more and is started again.
    command = [*_command(job, *_OF_TORCHRUN), "--try-again-code", str(128 + TRY_AGAIN)]
    replica = {"restartPolicy": "ExitCode", "template": {"spec": _pod(job, "pytorch", command)}}
    replicas = {"Master": {"replicas": 1, **replica}, "Worker": {"replicas": nodes - 1, **replica}}
    spec = {
        "nprocPerNode": str(job.machine.processes),
        "runPolicy": {"backoffLimit": nodes * job.max_restarts, **_limits(job)},
        "pytorchReplicaSpecs": replicas if nodes > 1 else {"Master": replicas["Master"]},
    }
    return [{"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": job.name}, "spec": spec}]


def _train_job(job: ClusterJob) -> list[Object]:
    """As a PyTorchJob, by Kubeflow's newer operator. A TrainJob itself cannot say what is tried again, so it brings a
    runtime of its own: that of PyTorch, with the pod and the rules of an indexed Job."""
    pod = _never_restarted(_pod(job, "node", _command(job, *_OF_TORCHRUN)))
    replicated = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {**_failures(job), "template": {"spec": pod}},
        },
    }
    nodes = job.machine.nodes
    runtime = {
        "apiVersion": _TRAINER,
        "kind": "TrainingRuntime",
        "metadata": {"name": job.name, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": nodes, "torch": {}},
            "template": {"spec": {"replicatedJobs": [replicated]}},
        },
    }
    spec = {
        "runtimeRef": {"name": job.name, "kind": "TrainingRuntime"},
        **_limits(job),
        "trainer": {"numNodes": nodes, "numProcPerNode": job.machine.processes, "resourcesPerNode": _resources(job)},
    }
    made = {"apiVersion": _TRAINER, "kind": "TrainJob", "metadata": {"name": job.name}, "spec": spec}
    return [runtime, made]
