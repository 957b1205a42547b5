"""A task for SkyPilot: it rents machines whose GPUs have memory enough, and runs on all of them."""

import shlex
from pathlib import Path
from typing import Any

from gptworks.errors import UsageError
from gptworks.launch.nodes import PORT
from gptworks.launch.schedulers import yaml_document
from gptworks.launch.schedulers.job import (
    ClusterJob,
    ShellText,
    require_stored,
    require_working_time,
    shell_lines,
)

SUFFIX = ".sky.yaml"
OPTIONS = frozenset({"setup"})

# The planner's names of GPUs in SkyPilot's words.
ACCELERATORS = {
    "v100-16g": "V100",
    "v100-32g": "V100-32GB",
    "a100-40g": "A100",
    "a100-80g": "A100-80GB",
    "h100-80g": "H100",
}
_BUCKETS = ("s3://", "gs://", "r2://", "cos://", "oci://", "https://")
_CONFIG_FILE = '"$HOME/gptworks-run.yaml"'  # quoted for the shell: not where others may write


def check(job: ClusterJob) -> None:
    if not job.image and not job.setup:
        raise UsageError(
            "--image: not given, and a rented machine has no gptworks. Needed: an image that has it, or --setup "
            "COMMAND that installs it."
        )
    if job.machine.nodes > 1 and not job.volumes:
        raise UsageError(
            f"--volume: not given, and {job.machine.nodes} machines share no disk. Needed: BUCKET:/PATH, such as "
            "s3://my-bucket:/data, for data and checkpoints."
        )
    for volume in job.volumes:
        if not volume.source.startswith(_BUCKETS):
            raise UsageError(
                f"--volume: {volume.source} is not a bucket. Needed: an address such as s3://my-bucket "
                f"({', '.join(_BUCKETS)})."
            )
    if job.machine.has_gpus and not job.devices:
        raise UsageError(
            "--device: no GPU that is known has memory enough for this layout. Needed: another one (`gptworks plan "
            "--search` finds it), or --device NAME with train.check_memory=off."
        )
    require_working_time(job)
    if job.volumes:
        require_stored(job)


def render(job: ClusterJob) -> str:
    task: dict[str, Any] = {"name": job.name, "num_nodes": job.machine.nodes, "resources": _resources(job)}
    if job.volumes:
        task["file_mounts"] = {volume.path: {"source": volume.source, "mode": "MOUNT"} for volume in job.volumes}
    if job.setup:
        task["setup"] = job.setup + "\n"
    task["run"] = _run(job)
    return job.comments + yaml_document.dump(task)


def submit_words(job: ClusterJob, path: Path) -> list[str]:
    return ["sky", "jobs", "launch", str(path)]


def _resources(job: ClusterJob) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if job.image:
        made["image_id"] = f"docker:{job.image}"
    if job.machine.has_gpus:
        # Any of them will do; SkyPilot takes what is cheapest.
        made["accelerators"] = {ACCELERATORS[name]: job.machine.processes for name in job.devices}
    else:
        made["cpus"] = f"{job.machine.processes}+"
    return made


def _run(job: ClusterJob) -> str:
    words = job.train_words("-c", ShellText(_CONFIG_FILE))
    words += job.launcher_words(ShellText('"$SKYPILOT_NODE_RANK"'), ShellText(f'"$master:{PORT}"'))
    lines = [f"cat > {_CONFIG_FILE} << 'CONFIG'", job.config.rstrip("\n"), "CONFIG"]
    if job.volumes:
        lines.append(f"cd {shlex.quote(job.volumes[0].path)}")
    if job.machine.nodes > 1:
        lines.append('master=$(head -n 1 <<< "$SKYPILOT_NODE_IPS")')
    if job.working_time is not None:  # then SIGTERM: the ranks finish the step, save and end
        words = ["timeout", "--signal=TERM", f"--kill-after={job.grace}", str(job.working_time), *words]
    return "\n".join([*lines, shell_lines(words, "  ")]) + "\n"
