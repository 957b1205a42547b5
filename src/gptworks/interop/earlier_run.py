"""A command that was run before: what it left is kept, and a new run of it lies beside."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from gptworks import run_paths
from gptworks.config.load import from_dict, load
from gptworks.errors import GPTWorksError
from gptworks.interop.translation import Translation


def beside_earlier_runs(translation: Translation, folder: Path) -> Translation:
    """Other systems write over the run before; ours is kept, and the new one gets a folder of its own."""
    out = str(translation.config.get("run.out", ""))
    resume = dict(pairwise(translation.arguments)).get("--resume", "never")
    if not out or resume != "never" or not run_paths.was_begun(folder / out):
        return translation
    earlier, number = Path(out), 2
    if earlier.name in ("", ".."):
        earlier = (folder / out).resolve()
    while (folder / earlier.with_name(f"{earlier.name}.{number}")).exists():
        number += 1
    free = earlier.with_name(f"{earlier.name}.{number}")
    remark = (
        f"{earlier} holds a run already, which this one would write over: it is {free} now. To go on with the earlier "
        f"one: gptworks train -c {earlier / run_paths.CONFIG} --out {earlier} --resume auto"
    )
    return replace(
        translation,
        config={**translation.config, "run.out": str(free)},
        after=[replace(each, path=_moved(each.path, earlier, free)) for each in translation.after],
        remarks=[*translation.remarks, remark],
    )


def _moved(path: str, earlier: Path, later: Path) -> str:
    inside = Path(path).is_relative_to(earlier)
    return str(later / Path(path).relative_to(earlier)) if inside else path


def has_its_model(translation: Translation) -> bool:
    """Whether the run in the folder of a command is one of the same command: as far as its checkpoints can tell."""
    try:
        earlier = load(Path(str(translation.config["run.out"])) / run_paths.CONFIG)
        return earlier.model == from_dict(translation.sections()).model
    except GPTWorksError:
        return False


def node_rank(arguments: Sequence[str]) -> int:
    """Which of the machines of a run this is."""
    from gptworks.launch import nodes

    values = dict(pairwise(arguments))
    options = {"nnodes": "--nnodes", "master": "--master", "node_ips": "--node-ips"}
    options |= {"table": "--rank-table", "ranks": "--rank-range"}
    rank = int(values["--node-rank"]) if "--node-rank" in values else None
    return nodes.solve(**{key: values.get(name, "") for key, name in options.items()}, node_rank=rank).rank
