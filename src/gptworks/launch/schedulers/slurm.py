"""A script for sbatch: saves before the time limit, queues itself again, and goes on from there."""

import shlex
from pathlib import Path

from gptworks.errors import TRY_AGAIN, UsageError
from gptworks.launch.schedulers.duration import slurm_duration
from gptworks.launch.schedulers.job import ClusterJob, ShellText, require_working_time, shell_lines

SUFFIX = ".sbatch"
OPTIONS = frozenset({"task_per", "setup"})
_EARLY = 60  # seconds by which Slurm may send its signal too early

_SCRIPT = """\
#!/bin/bash
{comments}#
# Submit it with sbatch, from a folder that all nodes see and in which the paths below are right. The run folder,
# {run_folder}, must be seen by all of them too. Options of yours (--partition, --account, --cpus-per-task, --mem) go
# before the file name.
{directives}
{setup}
# {grace} s before the limit Slurm sends USR1 to this script only, which tells the ranks: they finish the step, save
# and end. Then the job goes back into the queue, and the run goes on from that checkpoint.
time_is_up=
trap 'time_is_up=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

train() {{
  srun --kill-on-bad-exit=0{wait} ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}}{container} \\
    {command} &
  local step=$!
  wait "$step"
  code=$?
  while kill -0 "$step" 2> /dev/null; do # the trap came between
    wait "$step"
    code=$?
  done
}}

requeue() {{
  echo "$1; job $SLURM_JOB_ID goes back into the queue."
  scontrol requeue "$SLURM_JOB_ID"
  exit
}}

# Where these nodes fail again and again others may not: the job is queued again, {requeues} times at most.
queue_again() {{
  local failures="{name}-$SLURM_JOB_ID.failures"
  echo "$code on $SLURM_JOB_NODELIST" >> "$failures"
  (($(wc -l < "$failures") <= {requeues})) && requeue "The run ended with code $code"
}}

for ((attempt = 0; ; attempt++)); do
  train
  # 2 is a mistake that has to be fixed: the next attempt would end the same way.
  [[ -n $time_is_up && $code -ne 2 ]] && requeue "The time is up"
  case $code in 0 | 2 | 130 | 143) exit "$code" ;; esac
  if ((attempt >= {restarts})); then
    case $code in {try_again} | 137) queue_again ;; esac # a rank was killed, or a node is gone
    exit "$code"
  fi
  echo "The run ended with code $code. Attempt $((attempt + 2)) of {attempts} begins from the last checkpoint."
done
"""


def check(job: ClusterJob) -> None:
    if job.volumes and not job.image:
        raise UsageError(
            f"--volume: {job.volumes[0].source}:{job.volumes[0].path} is a folder of a container. Add --image, or "
            "leave it out: without a container the nodes see their own file systems."
        )
    require_working_time(job, _EARLY)


def render(job: ClusterJob) -> str:
    per_gpu = job.task_per == "gpu"
    words = job.train_words()
    if not per_gpu:  # srun says which node this is and where the first one is
        nodes = ["--nnodes", str(job.machine.nodes)] if job.machine.nodes > 1 else []
        words += [*nodes, "--nproc", str(job.machine.processes), "--max-restarts", str(job.max_restarts)]
    restarts = job.max_restarts if per_gpu else 0
    apptainer = _apptainer(job) if _is_apptainer(job.image) else []
    return _SCRIPT.format(
        comments=job.comments,
        run_folder=job.run_folder,
        directives="\n".join(f"#SBATCH {line}" for line in _directives(job)),
        setup=_setup(job),
        grace=job.grace,
        # Ranks that lose one of them end by themselves, with a code that says why; one that Slurm ends has 143, which,
        # being the highest, would be that of the job. Slurm ends only those that are still there after two minutes,
        # with 137. A launcher may still be saving when another has ended.
        wait=" --wait=120" if per_gpu else "",
        container=_pyxis(job) if job.image and not apptainer else "",
        command=shell_lines([*apptainer, *words], "    "),
        restarts=restarts,
        requeues=job.max_restarts,
        try_again=TRY_AGAIN,
        name=job.name,
        attempts=restarts + 1,
    )


def submit_words(job: ClusterJob, path: Path) -> list[str]:
    return ["sbatch", str(path)]


def _directives(job: ClusterJob) -> list[str]:
    machine = job.machine
    tasks = [f"--ntasks-per-node={machine.processes}"]
    if job.task_per == "node":
        tasks = ["--ntasks-per-node=1", f"--cpus-per-task={machine.processes}"]
    return [
        f"--job-name={job.name}",
        f"--nodes={machine.nodes}",
        *tasks,
        *([f"--gpus-per-node={machine.processes}"] if machine.has_gpus else []),
        *([f"--time={slurm_duration(job.time)}"] if job.time is not None else []),
        f"--signal=B:USR1@{job.grace}",
        "--requeue",
        "--open-mode=append",
        f"--output={job.name}-%j.log",
    ]


def _setup(job: ClusterJob) -> str:
    if job.image:
        return f"\n{job.setup}\n" if job.setup else ""
    missing = "gptworks: no such command on $(hostname). Say how it is found with gptworks launch --setup."
    check = f'command -v gptworks > /dev/null || {{ echo "{missing}" >&2; exit 2; }}'
    return "\n" + (f"{job.setup}\n" if job.setup else "") + check + "\n"


def _is_apptainer(image: str) -> bool:
    """A file of Apptainer (.sif) or an address with a scheme (docker://...); other names are for pyxis."""
    return image.endswith(".sif") or "://" in image


def _apptainer(job: ClusterJob) -> list[str]:
    binds = [word for volume in job.volumes for word in ("--bind", f"{volume.source}:{volume.path}")]
    gpus = ["--nv"] if job.machine.has_gpus else []
    here = ShellText('"$PWD"')
    return ["apptainer", "exec", *gpus, "--bind", here, "--pwd", here, *binds, job.image]


def _pyxis(job: ClusterJob) -> str:
    mounts = "".join(f",{volume.source}:{volume.path}" for volume in job.volumes)
    image = shlex.quote(f"--container-image={job.image}")
    folder = shlex.quote(mounts) if mounts else ""
    return f' \\\n    {image} --container-mounts="$PWD:$PWD"{folder} --container-workdir="$PWD"'
