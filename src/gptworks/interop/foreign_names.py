"""Checkpoints of a run also under the names the other system would have given them."""

import hashlib
import json
import shutil
from pathlib import Path

from gptworks import json_text, run_paths
from gptworks.checkpoint import manifest
from gptworks.checkpoint.convert import CERTIFICATE, convert
from gptworks.checkpoint.folder import CheckpointFolder
from gptworks.checkpoint.systems.contract import SplitSpec
from gptworks.interop.translation import AfterTraining

RECORD = run_paths.FOREIGN_NAMES  # in the run folder: what was written -> the checkpoint it was made from


def write(after: AfterTraining, run_folder: Path) -> None:
    """Write each kept checkpoint under their name. What another one of the same step left there makes way for it."""
    steps = CheckpointFolder(run_folder).steps()
    if not steps:
        return
    if "{" not in after.path and not after.spread:
        steps = {max(steps): steps[max(steps)]}
    by_epoch = "{epoch}" in after.path
    per_epoch = (after.steps_per_epoch or _steps_per_epoch(run_folder)) if by_epoch else 1
    record = _read(run_folder / RECORD)
    for step, folder in sorted(steps.items()):
        epoch, place = divmod(step - 1, per_epoch)
        target = Path(after.path.format(step=step, epoch=epoch + 1, step_in_epoch=place + 1))
        written = target / after.spread.format(step=step)
        identity = hashlib.sha256((folder / manifest.NAME).read_bytes()).hexdigest()
        if written.exists():
            if record.get(str(written)) == identity:
                continue
            _make_way(written, is_ours=str(written) in record)
        staged = target / f".{after.system}" if after.spread else target
        convert(folder, staged, after.system, cut=SplitSpec(after.tp, after.pp))
        if after.spread:
            for each in sorted(staged.iterdir()):
                each.replace(target / each.name)
            staged.rmdir()
        record[str(written)] = identity
        (run_folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        print(f"{written} ({after.system}: the same weights under the name it would have given them)")


def _make_way(written: Path, *, is_ours: bool) -> None:
    """One that we made is made again; another stays, under another name."""
    if is_ours:
        print(f"{written}: made from an earlier checkpoint; it is made anew.")
        shutil.rmtree(written) if written.is_dir() else written.unlink()
        written.with_name(f"{written.name}.{CERTIFICATE}").unlink(missing_ok=True)
        return
    number = 1
    while (aside := written.with_name(f"{written.name}.before-{number}")).exists():
        number += 1
    written.rename(aside)
    print(f"{written}: was not made from this run; it is {aside} now.")


def _read(path: Path) -> dict[str, str]:
    try:
        content = json_text.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _steps_per_epoch(run_folder: Path) -> int:
    from gptworks.config.derive import plan_batch
    from gptworks.config.load import load_with_origins
    from gptworks.data.dataset import Dataset

    cfg = load_with_origins(run_folder / run_paths.CONFIG).config
    samples = Dataset(cfg.data, vocab_size=cfg.model.vocab_size, seed=cfg.train.seed).samples_per_epoch("train")
    return max(1, samples // plan_batch(cfg.batch, cfg.model, cfg.data.seq_len, cfg.parallel).global_size)
