"""Our configuration in the words of others, and back."""

import re
from pathlib import Path

import pytest
import yaml

from gptworks.cli import translate
from gptworks.cli.main import main
from gptworks.config.load import flatten, load
from gptworks.config.schema import RunConfig
from gptworks.interop import command_line, fleetx, paddlenlp, registry, reverse
from gptworks.interop.adapt import adapted
from gptworks.interop.translation import Translation
from gptworks.interop.write_yaml import as_yaml

OURS = """
preset: gpt2-medium
model: {vocab_size: 50304, dropout_embed: 0.05, dropout_hidden: 0.05, dropout_attention: 0.2}
init: {std: 0.01, residual_scale: none}
data: {path: corpus, split: '90,9,1', seq_len: 512, order: paddle, mask_eod: true, tokenizer: gpt2}
batch: {global_size: 64, micro_size: 4}
optim: {lr: 3e-4, min_lr: 3e-5, warmup_steps: 50, decay_steps: 5000, weight_decay: 0.02, beta1: 0.8, beta2: 0.97,
        eps: 1e-7, clip: 0.5}
train: {steps: 6000, seed: 7, log_every: 5, recompute: core_attn, nonfinite: skip, log_style: fleetx}
parallel: {dp: 2, fsdp: 2, tp: 2, zero: 2, sequence: false}
precision: {compute: fp16, scaler: {init: 4096, window: 1000, hysteresis: 2}}
evaluate: {every: 100, batches: 32}
checkpoint: {every: 500, keep_last: 1000000}
run: {out: there}
"""


def test_the_help_names_every_system() -> None:
    assert translate.SYSTEMS.replace(" or ", ", ").split(", ") == list(reverse.WRITERS)


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    file = tmp_path / "ours.yaml"
    file.write_text(OURS, encoding="utf-8")
    return file


def foreign(system: str, file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["translate", "--to", system, str(file)]) == 0
    return capsys.readouterr().out


def not_said(text: str) -> list[str]:
    return re.findall(r"^# not said here: ([\w.]+)=", text, re.M)


def loaded(translation: Translation, folder: Path) -> RunConfig:
    served = adapted(translation, [], device="cpu", shrink=False, strict=False)
    (folder / "back.yaml").write_text(as_yaml(served), encoding="utf-8")
    return load(folder / "back.yaml")


def differing(one: RunConfig, other: RunConfig) -> set[str]:
    first, second = flatten(one.model_dump()), flatten(other.model_dump())
    apart = {key for key, value in first.items() if second[key] != value}
    return {key for key in apart if not key.startswith(("generate.", "run.device"))}


def test_fleetx_there_and_back(ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = foreign("fleetx", ours, capsys)
    assert not_said(text) == []
    theirs = yaml.safe_load(text)
    assert theirs["Optimizer"]["lr"] == {"decay_steps": 5000, "warmup_rate": 0.01, "max_lr": 3e-4, "min_lr": 3e-5}
    assert theirs["Data"]["batch_size"] == {"global_batch_size": 64, "local_batch_size": 16, "micro_batch_size": 4}
    assert theirs["Distributed"]["sharding"]["sharding_degree"] == 2
    (tmp_path / "theirs.yaml").write_text(text, encoding="utf-8")
    back = loaded(fleetx.translate_yaml(tmp_path / "theirs.yaml"), tmp_path)
    assert differing(load(ours), back) == set()


def test_paddlenlp_there_and_back(ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = foreign("paddlenlp", ours, capsys)
    assert not_said(text) == ["init.std"]  # its script has no flag for it
    command = command_line.split([text.partition("\n# not")[2].partition("\n")[2]], {}, Path())
    assert command.launcher_options["--gpus"] == "0,1,2,3,4,5,6,7"
    back = loaded(paddlenlp.translate(command, None), tmp_path)
    assert differing(load(ours), back) == {"init.std"}


def test_what_they_cannot_say_stands_above(ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours.write_text(OURS + "generate: {seed: 3}\n", encoding="utf-8")
    changed = OURS.replace("order: paddle", "order: shuffled").replace("dropout_embed: 0.05", "dropout_embed: 0.0")
    ours.write_text(changed.replace("init: 4096", "backoff: 0.8, init: 4096"), encoding="utf-8")
    text = foreign("fleetx", ours, capsys)
    assert not_said(text) == ["model.dropout_embed", "data.order", "precision.scaler.backoff"]
    assert '# not said here: data.order="shuffled"; there it is "paddle"' in text


def test_megatron_in_flags(ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = foreign("megatron", ours, capsys)
    commands = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    command = command_line.split([commands], {}, Path())
    assert (command.launcher, command.launcher_options) == ("torchrun", {"--nproc_per_node": "8"})
    assert command.program == "pretrain_gpt.py"
    found = command_line.flags(command.arguments, {"--fp16", "--eod-mask-loss"})
    assert (found["--num-layers"], found["--lr"], found["--lr-warmup-iters"]) == ("24", "0.0003", "50")
    assert (found["--tensor-model-parallel-size"], found["--global-batch-size"]) == ("2", "64")
    assert {"--fp16", "--eod-mask-loss"} <= found.keys() and found["--recompute-granularity"] == "selective"
    back = loaded(registry.dialect("megatron").translate(command, registry.Files(Path())), tmp_path)
    other = {key for key in differing(load(ours), back) if key.startswith(("optim.", "batch.", "train.", "evaluate."))}
    # Megatron's clock begins at 0, and is said to.
    assert other - {"train.log_style"} == {"optim.warmup_from"} <= set(not_said(text))


def test_mindformers_in_yaml(ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "--to", "mindformers", str(ours)]) == 2
    assert "optim.schedule: cosine" in capsys.readouterr().err
    ours.write_text(OURS.replace("optim: {", "optim: {schedule: linear, "), encoding="utf-8")
    text = foreign("mindformers", ours, capsys)
    theirs = yaml.safe_load(text)
    assert theirs["model"]["model_config"]["embedding_size"] == 1024
    assert theirs["lr_schedule"]["total_steps"] == 5000
    assert theirs["parallel_config"]["model_parallel"] == 2
    (tmp_path / "theirs.yaml").write_text(text, encoding="utf-8")
    back = loaded(registry.dialect("mindformers").translate_yaml(tmp_path / "theirs.yaml"), tmp_path)
    assert (back.model.hidden_size, back.optim.lr, back.parallel.tp) == (1024, 3e-4, 2)


def test_megatron_says_what_its_dialect_reads(ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = OURS.replace("model: {", "model: {gelu: erf, tied: false, ")
    changed = changed.replace("parallel: {dp: 2, fsdp: 2, tp: 2, zero: 2, sequence: false}", "parallel: PARALLEL")
    ours.write_text(changed.replace("PARALLEL", "{fsdp: 4, tp: 2, zero: 1, sequence: true}"), encoding="utf-8")
    told = not_said(foreign("megatron", ours, capsys))
    assert not {key for key in told if key.startswith(("model.gelu", "model.tied", "train.recompute", "parallel."))}


def test_mindformers_is_told_norm_and_factor_as_they_are(ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = OURS.replace("optim: {", "optim: {schedule: linear, ").replace("init: 4096", "growth: 1.5, init: 4096")
    ours.write_text(changed, encoding="utf-8")
    text = foreign("mindformers", ours, capsys)
    wrapper = yaml.safe_load(text)["runner_wrapper"]
    assert (wrapper["max_grad_norm"], wrapper["scale_sense"]["scale_factor"]) == (0.5, 1.5)
    assert not {"optim.clip", "precision.scaler.growth"} & set(not_said(text))


def test_what_makes_no_sense_is_refused(ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "--to", "oneflow", str(ours)]) == 2
    assert "needed one of megatron, fleetx, mindformers, paddlenlp" in capsys.readouterr().err
    ours.write_text(OURS.replace("model: {", "model: {num_layers: 6, "), encoding="utf-8")
    assert main(["translate", "--to", "paddlenlp", str(ours)]) == 2
    assert "takes a model by name: gpt2-en" in capsys.readouterr().err
    ours.write_text(OURS.replace("steps: 6000", "epochs: 2").replace("decay_steps: 5000, ", ""), encoding="utf-8")
    assert main(["translate", "--to", "fleetx", str(ours)]) == 2
    assert "train.steps: 0" in capsys.readouterr().err
    ours.write_text(OURS.replace("path: corpus", "path: [a, b]"), encoding="utf-8")
    assert main(["translate", "--to", "fleetx", str(ours)]) == 2
    assert "data.path: 2 paths" in capsys.readouterr().err
