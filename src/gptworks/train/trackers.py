"""Other programs that follow a run: TensorBoard, Weights & Biases, MLflow, Trackio. One small adapter each.

An adapter begins with the run or goes on in the same one there, gets each line of metrics.jsonl, and is told when steps
will be done again. Where a program keeps things, and whether it sends them anywhere, is set by its own variables
(WANDB_MODE, MLFLOW_TRACKING_URI, ...).
"""

import json
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from gptworks import errors, json_text, run_paths
from gptworks.config.load import flatten
from gptworks.config.schema import RunConfig
from gptworks.train.run_folder import replace_text

IDS = run_paths.TRACKERS  # by which runs are found again there
ENVIRONMENT = "environment"  # beside the sections of the configuration
_LONGEST_PARAMETER = 500  # characters, of MLflow


class Tracker(Protocol):
    name: str

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def rewind(self, step: int) -> None:
        """The steps after this one will be done again."""

    def close(self) -> None: ...


class TensorBoard:
    name = "tensorboard"

    def __init__(self, begun: "Begun") -> None:
        self._folder = str(begun.folder / "tensorboard")
        self._open(begun.step)
        if begun.config:
            self._board.add_text(
                "config", f"    {json.dumps(begun.config, indent=2)}".replace("\n", "\n    "), begun.step
            )

    def _open(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(self._folder, purge_step=step + 1)  # type: ignore[no-untyped-call]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._board.add_scalar(name, value, step)  # type: ignore[no-untyped-call]

    def rewind(self, step: int) -> None:
        self.close()
        self._open(step)

    def close(self) -> None:
        self._board.close()  # type: ignore[no-untyped-call]


class WandB:
    """Numbers are drawn over our own step: its own may only rise, and ours goes back when steps are done again."""

    name = "wandb"

    def __init__(self, begun: "Begun") -> None:
        import wandb

        begun.ids.setdefault(self.name, secrets.token_hex(4))
        self._run = wandb.init(
            project=begun.project,
            name=begun.folder.name,
            id=begun.ids[self.name],
            resume="allow",
            dir=str(begun.folder),
            config={**begun.config, ENVIRONMENT: begun.environment},
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def rewind(self, step: int) -> None:
        pass

    def close(self) -> None:
        self._run.finish()


class MLflow:
    name = "mlflow"

    def __init__(self, begun: "Begun") -> None:
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.tracking import MlflowClient

        self._client, self._metric = MlflowClient(), Metric
        if self.name not in begun.ids:
            known = self._client.get_experiment_by_name(begun.project)
            experiment = known.experiment_id if known else self._client.create_experiment(begun.project)
            made = self._client.create_run(experiment, run_name=begun.folder.name)
            begun.ids[self.name] = made.info.run_id
            settings = {key: str(value)[:_LONGEST_PARAMETER] for key, value in flatten(begun.config).items()}
            tags = {key: str(value)[:_LONGEST_PARAMETER] for key, value in begun.environment.items()}
            self._client.log_batch(
                begun.ids[self.name],
                params=[Param(key, value) for key, value in settings.items() if value],
                tags=[RunTag(f"{ENVIRONMENT}.{key}", value) for key, value in tags.items()],
            )
        self._id = begun.ids[self.name]
        self._client.update_run(self._id, status="RUNNING")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        import time

        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[self._metric(key, value, now, step) for key, value in values.items()])

    def rewind(self, step: int) -> None:
        pass  # the later of two values of a step is shown

    def close(self) -> None:
        self._client.set_terminated(self._id)


class Trackio:
    name = "trackio"

    def __init__(self, begun: "Begun") -> None:
        import trackio

        begun.ids.setdefault(self.name, begun.folder.resolve().name)
        self._trackio = trackio
        trackio.init(
            project=begun.project,
            name=begun.ids[self.name],
            resume="allow",
            config={**begun.config, ENVIRONMENT: begun.environment},
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def rewind(self, step: int) -> None:
        pass

    def close(self) -> None:
        self._trackio.finish()


ADAPTERS: dict[str, Callable[["Begun"], Tracker]] = {
    adapter.name: adapter  # type: ignore[attr-defined]
    for adapter in (TensorBoard, WandB, MLflow, Trackio)
}


class Begun:
    """What an adapter is told when a run begins or goes on; `ids` are kept with the run."""

    def __init__(self, folder: Path, step: int, config: dict[str, Any], project: str) -> None:
        self.folder, self.step, self.config, self.project = folder, step, config, project
        self.environment: dict[str, Any] = {}
        self.ids: dict[str, str] = {}
        with suppress(OSError, ValueError):
            content = json_text.loads_record((folder / run_paths.ENVIRONMENT).read_text(encoding="utf-8"))
            self.environment = content if isinstance(content, dict) else {}
        with suppress(FileNotFoundError):
            self.ids = _ids(folder / IDS)


def _ids(path: Path) -> dict[str, str]:
    try:
        content = json_text.loads_record(path.read_text(encoding="utf-8"))
    except ValueError:
        content = None
    if not isinstance(content, dict) or not all(isinstance(each, str) for each in content.values()):
        raise errors.TrainingError(
            f"{path}: holds no names of runs, so run.track cannot go on in them. Remove it, and another run begins "
            "there."
        )
    return content


def require_installed(names: tuple[str, ...]) -> None:
    """Before anything is trained."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise errors.ConfigError(
            "run", [f"run.track: {name} is not installed. Install it: pip install {name}" for name in missing]
        )


def begin(cfg: RunConfig, folder: Path, step: int) -> list[Tracker]:
    """By the main process. Without run.track, TensorBoard's files are written where it is installed."""
    names = cfg.run.track or (("tensorboard",) if find_spec("tensorboard") else ())
    config = cfg.model_dump(mode="json") if cfg.run.track else {}
    begun = Begun(folder, step, config, cfg.run.project)
    adapters: list[Tracker] = []
    for name in names:
        try:
            adapters.append(ADAPTERS[name](begun))
        except Exception as error:
            raise errors.TrainingError(
                f"run.track: {name} could not begin: {type(error).__name__}: {errors.first_line(error)}. Fix that, or "
                "leave it out of run.track."
            ) from error
    if begun.ids:
        replace_text(folder / IDS, json.dumps(begun.ids) + "\n")
    return adapters
