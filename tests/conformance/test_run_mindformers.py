"""MindFormers' own commands, through `gptworks run`. Rows of the conformance list: S4-01 to S4-05, S4-10, X-01."""

import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from gptworks.checkpoint.formats import mindspore_ckpt
from gptworks.checkpoint.systems import registry as systems
from gptworks.cli.main import main
from gptworks.data.store import Store
from gptworks.interop import command_line, mindformers, registry
from gptworks.interop.settings import parse_bool, parse_float, parse_int
from gptworks.interop.translation import Translation
from gptworks.launch import nodes, rank_table
from gptworks.tokenizer import Tokenizer

SHIPPED = Path(str(resources.files("gptworks.interop"))) / "shipped"
# As the document has it; the place of the data is the reader's.
TRAIN = """python run_mindformer.py --config configs/gpt2/run_gpt2.yaml \\
                         --run_mode train \\
                         --device_target Ascend \\
                         --dataset_dir {data}"""
CONVERT = (
    "python mindformers/models/gpt2/convert_weight.py --layers 12 --torch_path pytorch_model.bin "
    "--mindspore_path ./mindspore_gpt2.ckpt"
)
DISTRIBUTE = "bash run_distribute.sh {table} ../configs/gpt2/run_gpt2_13b.yaml {ranks} train"
# What the document changes in run_gpt2_13b.yaml for two machines.
TWO_MACHINES = """
parallel_config:
  data_parallel: 2
  model_parallel: 8
  pipeline_stage: 1
  optimizer_shard: True
  micro_batch_num: 1
  vocab_emb_dp: True
  gradient_aggregation_group: 4
"""


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def gptworks(*args: object, expect: int = 0) -> Done:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(arg) for arg in args])
    assert code == expect, f"exit {code}\n{out.getvalue()[-3000:]}\n{err.getvalue()}"
    return Done(code, out.getvalue(), err.getvalue())


def run(folder: Path, command: str, *options: str, expect: int = 0) -> Done:
    return gptworks("run", "--device", "cpu", *options, "--cwd", folder, "--", command, expect=expect)


def translated(command: str, folder: Path) -> Translation:
    taken = command_line.split([command], os.environ, folder)
    return registry.of_command(taken).translate(taken, registry.Files(folder))


def noted(done: Done) -> set[str]:
    """The settings that were shown, one a line."""
    lines = done.out.split("\n$ ")[0].splitlines()[1:]
    return {line.split()[0] for line in lines if line.startswith("  ")}


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in ("step", "loss", "lr", "grad_norm")} for line in lines if "loss" in line]


# Without dropout and in fp32 the layout changes nothing but the order of sums.
EXACT = {"compute_dtype": "float32", "hidden_dropout_prob": "0.0", "attention_probs_dropout_prob": "0.0"}


def assert_alike(lines: list[dict[str, Any]], alone: list[dict[str, Any]]) -> None:
    assert [line["lr"] for line in lines] == [line["lr"] for line in alone]
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in alone], abs=5e-6)


def edited(name: str, **replaced: str) -> str:
    """A file of the document with other values, by key; each key is there once."""
    text = (SHIPPED / name).read_text()
    for key, value in replaced.items():
        (line,) = [line for line in text.splitlines() if line.strip().startswith(f"{key}:")]
        text = text.replace(line, line.split(":")[0] + f": {value}")
    return text


def write_configs(folder: Path, **replaced: str) -> Path:
    configs = folder / "configs" / "gpt2"
    configs.mkdir(parents=True)
    (configs / "run_gpt2.yaml").write_text(edited("run_gpt2.yaml", **replaced))
    return configs


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


PROCESS = (
    "python mindformers/tools/dataset_preprocess/gpt2/wikitext2_data_process.py --input_file wiki.train.tokens "
    "--output_file ./wiki/train.mindrecord --num_splits 1 --max_length 1025"
)


def test_s4_01_wikitext_becomes_rows_of_one_more_than_the_model_reads(corpus_file: Path, tmp_path: Path) -> None:
    """The whole text at once, cut into rows that share no token; what is left over is dropped."""
    text = corpus_file.read_text(encoding="utf-8")[:14000]
    (tmp_path / "wiki.train.tokens").write_text(text, encoding="utf-8")
    done = run(tmp_path, PROCESS)
    assert noted(done) == {"--input_file", "--output_file", "--num_splits", "--max_length"}
    store = Store(tmp_path / "wiki" / "train.mindrecord")
    ids = Tokenizer.from_pretrained("gpt2").encode(text)
    count = len(ids) // 1025
    assert count >= 3 and store.contents.is_rows and store.contents.sizes.tolist() == [1025] * count
    assert store.tokens[: count * 1025].tolist() == ids[: count * 1025]
    header = (tmp_path / "wiki" / "train.mindrecord").read_bytes()[8:4096]
    for column in (b"input_ids", b"attention_mask", b"labels"):
        assert b'"%s"' % column in header
    assert (tmp_path / "wiki" / "train.mindrecord.db").is_file()


@pytest.fixture(scope="module")
def rows(corpus_file: Path, small_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of S + 1 tokens, as the document wants them. A small vocabulary: fp16 is slow on a CPU."""
    from gptworks.data.prepare import PrepareJob, prepare

    folder = tmp_path_factory.mktemp("data") / "wikitext-2-mindrecord"
    folder.mkdir()
    prepare(PrepareJob([str(corpus_file)], folder / "train", small_tokenizer, format="mindrecord", row_length=1025))
    return folder


@pytest.fixture(scope="module")
def trained(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """The document's first command, run in a folder with the configuration of the document."""
    folder = tmp_path_factory.mktemp("mindformers")
    write_configs(folder, vocab_size="512", save_checkpoint_steps="4")
    return folder, run(folder, TRAIN.format(data=rows), "--shrink", "tiny")


def test_s4_02_the_documents_command_trains_as_the_translated_yaml_does(
    trained: tuple[Path, Done], tmp_path: Path
) -> None:
    folder, _ = trained
    gptworks("train", "-c", folder / "run_mindformer.gptworks.yaml", "--out", tmp_path / "native")
    theirs, native = metrics(folder / "output"), metrics(tmp_path / "native")
    assert theirs == native
    assert len(theirs) == 10 and theirs[-1]["loss"] < theirs[0]["loss"]
    # polynomial, power 1: the first update has the whole rate, and the line ends at lr_end after the last one
    assert [line["lr"] for line in theirs[:3]] == pytest.approx([1e-4, 9.1e-5, 8.2e-5])


def test_s4_02_every_key_of_command_and_yaml_has_a_note(trained: tuple[Path, Done]) -> None:
    folder, done = trained
    given = yaml.safe_load((folder / "configs/gpt2/run_gpt2.yaml").read_text())
    callbacks = {name: given.pop(name) for name in ("callbacks", "eval_callbacks")}

    def dotted(values: dict[str, Any], prefix: str = "") -> set[str]:
        found = set()
        for key, value in values.items():
            found |= dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}"}
        return found

    keys = dotted(given)
    for name, entries in callbacks.items():
        for entry in entries:
            kind = entry["type"]
            keys |= {f"{name}.{kind}", *(f"{name}.{kind}.{key}" for key in entry if key != "type")}
    assert noted(done) == keys | {"--config", "--run_mode", "--device_target", "--dataset_dir"}
    for line in done.out.split("\n$ ")[0].splitlines():
        assert not line.endswith("ignored"), line  # always with the reason


def test_s4_02_checkpoints_are_there_under_their_names_and_hold_the_same_weights(trained: tuple[Path, Done]) -> None:
    folder, _ = trained
    kept = folder / "output" / "rank_0" / "checkpoint"
    # A sink of one step is an epoch to MindSpore.
    names = ["mindformers_rank_0-10_1.ckpt", "mindformers_rank_0-4_1.ckpt", "mindformers_rank_0-8_1.ckpt"]
    assert sorted(file.name for file in kept.iterdir()) == names
    theirs = mindspore_ckpt.read(kept / names[0]).tensors
    ours = systems.open_any(folder / "output").tensors
    table = "backbone.embedding.word_embedding.embedding_table"
    assert torch.equal(theirs[table].read(), ours["wte.weight"].read())
    assert len(theirs) == 4 + 2 * 16


@pytest.mark.slow
def test_s4_02_finetune_eval_and_predict_use_what_training_left(trained: tuple[Path, Done], rows: Path) -> None:
    folder, _ = trained
    given = "python run_mindformer.py --config configs/gpt2/run_gpt2.yaml --device_target CPU "
    last = "--load_checkpoint ./output/rank_0/checkpoint/mindformers_rank_0-10_1.ckpt "
    before = metrics(folder / "output")
    run(folder, f"{given} --run_mode finetune {last} --dataset_dir {rows} --output_dir tuned", "--shrink", "tiny")
    assert metrics(folder / "tuned")[0]["loss"] < before[2]["loss"], "it begins with the trained weights"
    done = run(folder, f"{given} --run_mode eval {last} --dataset_dir {rows}", "--shrink", "tiny")
    assert "--seq-len 64" in done.out and "-o model.num_heads=4" in done.out and "perplexity" in done.out
    prompt = "--predict_data 'I love Beijing, because'"
    done = run(folder, f"{given} --run_mode predict --load_checkpoint ./output {prompt}", "--shrink", "tiny")
    assert "--rules mindformers --top-k 5" in done.out
    assert done.out.split("\n$ ")[1].splitlines()[2].startswith("I love Beijing, because")
    again = run(folder, f"{given} --run_mode predict --load_checkpoint ./output {prompt}", "--shrink", "tiny")
    assert again.out == done.out, "MindFormers seeds its draws with 0 for each call"


def test_s4_02_training_goes_on_from_a_file_it_wrote(trained: tuple[Path, Done], rows: Path) -> None:
    folder, _ = trained
    resume = "resume_or_finetune_checkpoint=output/rank_0/checkpoint/mindformers_rank_0-8_1.ckpt"
    found = translated(TRAIN.format(data=rows) + f" --options {resume}", folder)
    assert found.arguments == ["--resume", str(Path("output/checkpoints/step-00000008"))]
    other = translated(TRAIN.format(data=rows) + " --options resume_or_finetune_checkpoint=theirs-3_1.ckpt", folder)
    (note,) = [note for note in other.notes if note.theirs == "resume_or_finetune_checkpoint"]
    assert other.config["init.checkpoint"] == "theirs-3_1.ckpt" and note.how == "approximated"


def test_s4_02_the_file_of_the_document_has_its_values(tmp_path: Path) -> None:
    config = translated(TRAIN.format(data="wiki"), tmp_path).config
    expected = {
        "model.num_layers": 12, "model.hidden_size": 768, "model.num_heads": 12, "model.ffn_size": 3072,
        "model.vocab_size": 50257, "model.max_positions": 1024, "model.gelu": "tanh", "model.dropout_embed": 0.0,
        "model.dropout_hidden": 0.1, "model.dropout_attention": 0.1, "data.path": ("wiki",), "data.seq_len": 1024,
        "batch.global_size": 8, "batch.micro_size": 8, "train.epochs": 3.0, "train.seed": 0, "train.recompute": "none",
        "optim.lr": 1e-4, "optim.min_lr": 1e-5, "optim.schedule": "linear", "optim.warmup_steps": 0,
        "optim.warmup_from": 0, "optim.beta1": 0.9, "optim.beta2": 0.95, "optim.eps": 1e-8, "optim.weight_decay": 0.1,
        "optim.clip": 1.0, "precision.compute": "fp16", "precision.scaler.init": 2.0**32,
        "precision.scaler.window": 1000,
        "checkpoint.every": 100, "checkpoint.keep_last": 5, "run.out": "./output", "generate.top_k": 5,
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected


def test_s4_02_defaults_are_theirs_where_the_file_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "short.yaml").write_text("runner_config:\n  epochs: 1\n")
    config = mindformers.translate_yaml(tmp_path / "short.yaml").config
    expected = {"optim.weight_decay": 0.0, "optim.beta2": 0.999, "optim.eps": 1e-6, "optim.clip": 0.0}
    expected |= {"precision.scaler.init": 1.0, "precision.scaler.growth": 1.0, "checkpoint.every": 0, "init.std": 0.01}
    assert {key: config[key] for key in expected} == expected


def test_s4_02_base_config_replaces_blocks_and_the_file_changes_keys(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text("runner_config: {epochs: 7, batch_size: 5}\nseed: 3\n")
    (tmp_path / "second.yaml").write_text("runner_config: {batch_size: 6}\nlr_schedule: {lr_end: 1.0e-6}\n")
    (tmp_path / "run.yaml").write_text(
        "base_config: ['./first.yaml', './second.yaml']\nlr_schedule: {learning_rate: 0.002}\n"
    )
    config = mindformers.translate_yaml(tmp_path / "run.yaml").config
    assert config["batch.global_size"] == 6 and config["train.epochs"] == 1.0, "the second file took the whole block"
    assert (config["optim.lr"], config["optim.min_lr"], config["train.seed"]) == (0.002, 1e-6, 3)
    shown = gptworks("translate", "--device", "cpu", tmp_path / "run.yaml").out
    values = yaml.safe_load(shown)
    assert values["batch"]["global_size"] == 6 and "# lr_schedule.learning_rate=0.002" in shown


# A command with everything switched on, so that every key that can matter does.
RICH = """
seed: 1
run_mode: train
output_dir: ./output
use_parallel: True
profile: True
profile_start_step: 2
profile_stop_step: 4
lr_scale: True
lr_scale_factor: 256
context: {device_target: CPU}
parallel: {parallel_mode: 1, enable_parallel_optimizer: False}
parallel_config:
  {data_parallel: 2, model_parallel: 2, pipeline_stage: 2, optimizer_shard: False, micro_batch_num: 4,
   use_seq_parallel: False}
recompute_config: {recompute: False}
runner_config: {epochs: 3, batch_size: 8, gradient_accumulation_steps: 1, sink_mode: True, sink_size: 1}
runner_wrapper:
  scale_sense: {type: DynamicLossScaleUpdateCell, loss_scale_value: 1024, scale_factor: 2, scale_window: 10}
  use_clip_grad: True
  max_grad_norm: 1.0
optimizer: {type: AdamW, beta1: 0.9, beta2: 0.95, eps: 1.0e-8, weight_decay: 0.1}
lr_schedule: {type: polynomial, learning_rate: 0.001, lr_end: 0.0001, warmup_steps: 2, total_steps: 50}
callbacks:
  - {type: MFLossMonitor, per_print_times: 1}
  - {type: CheckpointMointor, prefix: gpt, directory: there, save_checkpoint_steps: 5, keep_checkpoint_max: 2,
     async_save: False}
train_dataset: {data_loader: {dataset_dir: here, shuffle: True}, repeat: 1}
load_checkpoint: ""
model:
  model_config:
    {seq_length: 64, vocab_size: 512, embedding_size: 64, num_layers: 4, num_heads: 4, expand_ratio: 4,
     hidden_act: gelu, dropout_prob: 0.1, hidden_dropout_prob: 0.1, attention_probs_dropout_prob: 0.1,
     layernorm_epsilon: 1.0e-5,
     compute_dtype: float16, repetition_penalty: 1, max_decode_length: 32, top_k: 5, top_p: 0.9, do_sample: True,
     checkpoint_name_or_path: gpt2}
"""  # fmt: skip
OTHER_WORDS = {
    "run_mode": "finetune", "output_dir": "elsewhere", "context.device_target": "GPU", "parallel.parallel_mode": "0",
    "runner_wrapper.scale_sense.type": "FixedLossScaleUpdateCell", "optimizer.type": "", "lr_schedule.type": "cosine",
    "callbacks.CheckpointMointor.prefix": "other", "callbacks.CheckpointMointor.directory": "other",
    "train_dataset.data_loader.dataset_dir": "other", "load_checkpoint": "x.ckpt", "callbacks.CheckpointMointor": "",
    "model.model_config.hidden_act": "fast_gelu", "model.model_config.compute_dtype": "float32",
}  # fmt: skip


def test_s4_02_changing_any_mapped_key_changes_what_is_run(tmp_path: Path) -> None:
    (tmp_path / "rich.yaml").write_text(RICH)
    values = mindformers.keys_of(mindformers.read_yaml(tmp_path / "rich.yaml"))
    kinds = {key.theirs: key.read for key in mindformers.KEYS}

    def what(given: dict[str, str]) -> Any:
        found = mindformers._translate(given, {}, {}, "rich.yaml", None)
        return found.verb, found.config, found.arguments, found.stated, found.after

    def other(key: str) -> str:
        if kinds[key] is parse_bool:
            return str(values[key] != "True")
        if kinds[key] is parse_int:
            return str(2 * int(values[key]) or 1)
        if kinds[key] is parse_float:
            return str(0.5 * float(values[key]) or 0.5)
        return OTHER_WORDS[key]

    usual = mindformers._translate(values, {}, {}, "rich.yaml", None)
    assert {note.theirs for note in usual.notes} == set(values)
    mapped = [note.theirs for note in usual.notes if note.ours] + ["load_checkpoint"]
    alike = {"optimizer.type", "callbacks.CheckpointMointor"}  # all of Adam's are AdamW; the other has no value
    assert len(mapped) > 50
    same = [key for key in mapped if what(values | {key: other(key)}) == what(values)]
    assert set(same) <= alike


def test_s4_02_mistakes_get_a_helpful_answer(rows: Path, tmp_path: Path) -> None:
    write_configs(tmp_path, vocab_size="512")
    command = TRAIN.format(data=rows)

    def refused(changed: str, *options: str) -> str:
        return run(tmp_path, changed, *options, expect=2).err

    assert "model.model_config.num_layer: unknown; did you mean model.model_config.num_layers?" in refused(
        f"{command} --options model.model_config.num_layer=2"
    )
    assert "--dataset: unknown; did you mean --dataset_dir?" in refused(f"{command} --dataset x")
    assert "--use_parallel: no value. Needed: such as --use_parallel True." in refused(f"{command} --use_parallel")
    assert "run_mode: got 'pretrain'; needs one of train, finetune, eval, predict." in refused(
        command.replace("train ", "pretrain ", 1)
    )
    swapped = "--options lr_schedule.learning_rate=1e-5 lr_schedule.lr_end=1e-4"
    assert "1e-05 is not above lr_end (0.0001)" in refused(f"{command} {swapped}")
    assert "hidden_act: got 'relu'; needs gelu or fast_gelu." in refused(
        f"{command} --options model.model_config.hidden_act=relu"
    )
    assert "--dataset_dir /your_path/wikitext-2-mindrecord (data.path): no such dataset" in refused(
        TRAIN.format(data="/your_path/wikitext-2-mindrecord"), "--shrink", "tiny"
    )
    strict = refused(f"{command} --options do_eval=True", "--strict")
    assert "--strict: 1 problem\n  do_eval: ignored (evaluate.every, with a held-out share or file)." in strict
    no_data = "python run_mindformer.py --config configs/gpt2/run_gpt2.yaml --run_mode train"
    assert "--dataset_dir (data.path): not set" in refused(no_data)
    asked = gptworks("run", "--cwd", tmp_path, "--", command, expect=2).err
    assert "asks for Ascend" in asked and "--device cpu" in asked


# Rank tables


def make_table(folder: Path, machines: int, each: int, port: int = 0) -> Path:
    names = [f"127.0.0.{n}" + (f":{port}" if port else "") for n in range(1, machines + 1)]
    table = rank_table.merge([rank_table.make(range(each), name) for name in names])
    file = folder / "rank_table.json"
    file.write_text(rank_table.dump(table))
    return file


@pytest.mark.slow
def test_s4_03_run_distribute_starts_the_ranks_of_the_table(rows: Path, tmp_path: Path) -> None:
    """Plain data parallelism, two processes: the global batch is twice that of one, read by both."""
    samples = "True\n    num_samples: 48"
    write_configs(tmp_path, vocab_size="512", epochs="1", dataset_dir=str(rows), shuffle=samples, **EXACT)
    (tmp_path / "scripts").mkdir()
    make_table(tmp_path / "scripts", 1, 2)
    command = "bash run_distribute.sh rank_table.json ../configs/gpt2/run_gpt2.yaml [0,2] train"
    done = run(tmp_path / "scripts", command, "--shrink", "tiny")
    in_file = set(mindformers.keys_of(mindformers.read_yaml(tmp_path / "configs/gpt2/run_gpt2.yaml")))
    assert noted(done) == {"RANK_TABLE_FILE", "CONFIG_PATH", "DEVICE_RANGE", "RUN_STATUS"} | in_file
    lines = metrics(tmp_path / "scripts" / "output")
    assert len(lines) == 3
    assert (tmp_path / "scripts/output/rank_0/checkpoint/mindformers_rank_0-3_1.ckpt").is_file()
    one = tmp_path / "scripts" / "run_distribute.gptworks.yaml"
    gptworks("train", "-c", one, "--out", tmp_path / "one", "-o", "parallel.dp=1")
    assert_alike(lines, metrics(tmp_path / "one"))


@pytest.mark.parametrize(("status", "verb"), [("train", "train"), ("finetune", "train"), ("predict", "generate")])
def test_s4_03_the_statuses_of_the_script(status: str, verb: str, tmp_path: Path) -> None:
    make_table(tmp_path, 1, 8)
    text = edited("run_gpt2.yaml") + "\ninput_data: Hello\n"
    (tmp_path / "run_gpt2.yaml").write_text(text)
    found = translated(f"bash run_distribute.sh rank_table.json run_gpt2.yaml [0,8] {status}", tmp_path)
    assert found.verb == verb
    if verb == "train":
        assert found.config["parallel.dp"] == 8 and found.config["batch.global_size"] == 64
        assert found.arguments == ["--rank-table", "rank_table.json", "--rank-range", "[0,8]"]
        assert found.config.get("init.checkpoint", "") == ("gpt2" if status == "finetune" else "")
    else:
        assert found.arguments[:2] == ["--model", "gpt2"]


def test_s4_03_placeholders_and_wrong_words_are_answered(tmp_path: Path) -> None:
    def refused(command: str) -> str:
        return run(tmp_path, command, expect=2).err

    as_printed = refused("bash run_distribute.sh RANK_TABLE_FILE CONFIG_PATH DEVICE_RANGE RUN_STATUS")
    assert "RANK_TABLE_FILE: no such file" in as_printed and "hccl_tools.py --device_num [0,8]" in as_printed
    assert "got 5 words" not in refused("bash run_distribute.sh a b [0,8] train 8")
    assert "A range is one word: [0,8]." in refused("bash run_distribute.sh a b [0, 8] train 8")
    make_table(tmp_path, 1, 8)
    there = "bash run_distribute.sh rank_table.json run_gpt2.yaml"
    assert "Merge the tables of all machines" in refused(f"{there} [8,16] train")
    assert "RANK_SIZE: got 16, but rank_table.json has 8 ranks" in refused(f"{there} [0,8] train 16")
    assert "run_mode: got 'pretrain'" in refused(f"{there} [0,8] pretrain")


def test_s4_04_tables_are_made_and_merged_by_their_tools(tmp_path: Path) -> None:
    tool = "python mindformers/tools/hccl_tools.py --device_num '[0,8)' --server_ip"
    for machine in ("10.155.111.140", "10.155.111.141"):
        done = run(tmp_path, f"{tool} {machine}")
        assert noted(done) == {"--device_num", "--server_ip"}
    made = [f"hccl_8p_01234567_10.155.111.14{n}.json" for n in (0, 1)]
    run(tmp_path, f"python mindformers/tools/merge_hccl.py {made[0]} {made[1]}")
    table = rank_table.read(tmp_path / "hccl_2s_16p.json")
    assert [server.ranks for server in table.servers] == [range(8), range(8, 16)]
    # The second machine, which the script of the document's time could not start.
    found = translated(DISTRIBUTE.format(table="hccl_2s_16p.json", ranks="[8,16]"), write_13b(tmp_path))
    place = nodes.solve(table=str(tmp_path / found.arguments[1]), ranks=found.arguments[3])
    assert (place.rank, place.count, place.nproc) == (1, 2, (8, 8)) and place.master == "10.155.111.140"


# The 13B model on two machines


def write_13b(folder: Path, **replaced: str) -> Path:
    """The folder `scripts`, with the document's change in the YAML."""
    configs = write_configs(folder, **replaced)
    text = (SHIPPED / "run_gpt2_13b.yaml").read_text()
    start = text.index("parallel_config:")
    end = text.index("runner_config:", start)
    (configs / "run_gpt2_13b.yaml").write_text(text[:start] + TWO_MACHINES.strip() + "\n\n" + text[end:])
    scripts = folder / "scripts"
    scripts.mkdir()
    for file in folder.glob("*.json"):
        (scripts / file.name).write_bytes(file.read_bytes())
    return scripts


def test_s4_05_the_layout_of_the_13b_model(tmp_path: Path) -> None:
    scripts = write_13b(tmp_path)
    make_table(scripts, 2, 8)
    found = translated(DISTRIBUTE.format(table="rank_table.json", ranks="[0,8]"), scripts)
    config = found.config
    layout = {axis: config[f"parallel.{axis}"] for axis in ("pp", "dp", "fsdp", "tp", "zero")}
    assert layout == {"pp": 1, "dp": 1, "fsdp": 2, "tp": 8, "zero": 1}
    assert config["batch.global_size"] == 4 and config["train.recompute"] == "full"
    assert (config["model.hidden_size"], config["model.num_layers"], config["model.num_heads"]) == (5120, 40, 40)
    assert config["model.gelu"] == "sigmoid" and config["optim.warmup_steps"] == 2000
    notes = {note.theirs: note for note in found.notes}
    for key in yaml.safe_load(TWO_MACHINES)["parallel_config"]:
        assert notes[f"parallel_config.{key}"].how in ("mapped", "ignored")
    # as it comes, for 32 devices, it does not fit the table
    shipped = run(scripts, "bash run_distribute.sh rank_table.json run_gpt2_13b.yaml [0,8] train", expect=2).err
    assert "data_parallel 4 x model_parallel 8 x pipeline_stage 1 = 32, but the rank table has 16 devices" in shipped
    assert "such as data_parallel: 2" in shipped


@pytest.mark.slow
def test_s4_05_the_13b_example_dry_runs_on_16_ranks(tmp_path: Path) -> None:
    scripts = write_13b(tmp_path)
    make_table(scripts, 2, 8)
    command = DISTRIBUTE.format(table="rank_table.json", ranks="[0,8]")
    run(scripts, command, "--dry-run")
    shown = gptworks("train", "-c", scripts / "run_distribute.gptworks.yaml", "--dry-run", "--world", "16").out
    assert "fsdp2.tp8: 16 processes" in shown and "12,848,143,360" in shown


@pytest.mark.slow
def test_s4_05_the_13b_example_runs_tiny_on_two_machines_of_8_processes(
    rows: Path, tmp_path: Path, held_port: Callable[[], int]
) -> None:
    samples = "True\n    num_samples: 12"
    scripts = write_13b(tmp_path, vocab_size="512", dataset_dir=str(rows), shuffle=samples, **EXACT)
    make_table(scripts, 2, 8, port=held_port())
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    machines = []
    for ranks in ("[0,8]", "[8,16]"):
        command = shlex.split(DISTRIBUTE.format(table="rank_table.json", ranks=ranks))
        words = [sys.executable, "-m", "gptworks", "run", "--device", "cpu", "--shrink", "tiny", "--", *command]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        machines.append(subprocess.Popen(words, cwd=scripts, env=environment, **pipes))
    told = [machine.communicate()[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], "\n".join(told)
    lines = metrics(scripts / "output")
    assert len(lines) == 6
    native = tmp_path / "native"
    one = ["-o", "parallel.fsdp=1", "-o", "parallel.zero=0", "-o", "parallel.tp=1", "-o", "batch.micro_size=2"]
    gptworks("train", "-c", scripts / "run_distribute.gptworks.yaml", *one, "--out", native)
    assert_alike(lines, metrics(native))
    assert (scripts / "output/rank_0/checkpoint/gpt2-13b_rank_0-6_1.ckpt").is_file()


# Weights, and the whole document


@pytest.fixture
def pytorch_model(tmp_path: Path) -> Callable[[Path], dict[str, torch.Tensor]]:
    """`pytorch_model.bin` alone, as the document downloads it: 12 layers, here narrow ones."""

    def write(folder: Path) -> dict[str, torch.Tensor]:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(3)
        model = GPT2LMHeadModel(
            GPT2Config(n_embd=64, n_head=1, n_layer=12, n_positions=16, vocab_size=60, bos_token_id=0, eos_token_id=0)
        )
        state = {key.removeprefix("transformer."): value for key, value in model.state_dict().items()}
        del state["lm_head.weight"]
        state |= {f"h.{i}.attn.bias": torch.ones(1, 1, 16, 16).tril() for i in range(12)}
        torch.save(state, folder / "pytorch_model.bin")
        return state

    return write


def test_s4_10_convert_weight_as_the_document_has_it(
    pytorch_model: Callable[[Path], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    state = pytorch_model(tmp_path)
    done = run(tmp_path, CONVERT)
    assert noted(done) == {"--layers", "--torch_path", "--mindspore_path"}
    assert "-o model.num_heads=1" in done.out  # of which the bytes below do not depend
    found = {name: each.read() for name, each in mindspore_ckpt.read(tmp_path / "mindspore_gpt2.ckpt").tensors.items()}
    assert len(found) == 4 + 12 * 16
    query, key, value = state["h.11.attn.c_attn.weight"].chunk(3, dim=1)
    for n, part in enumerate((query, key, value), 1):
        assert torch.equal(found[f"backbone.blocks.11.attention.dense{n}.weight"], part.T)
    assert torch.equal(found["backbone.blocks.0.output.mapping.weight"], state["h.0.mlp.c_fc.weight"])
    missing = run(tmp_path, CONVERT.replace("pytorch_model", "none").replace("./mindspore", "./other"), expect=2).err
    assert missing.startswith("error: --torch_path none.bin (SOURCE): no such file")


@pytest.mark.slow
def test_x_01_the_document_as_one_story(
    corpus_file: Path, pytorch_model: Callable[[Path], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """In one folder: rows from text, training, its checkpoint measured and used, more training, weights converted."""
    small = ("--shrink", "tiny")
    write_configs(
        tmp_path,
        compute_dtype="float32",
    )
    (tmp_path / "wiki.train.tokens").write_text(corpus_file.read_text(encoding="utf-8")[:24000], encoding="utf-8")
    run(tmp_path, PROCESS)
    run(tmp_path, TRAIN.format(data="wiki") + " --num_samples 6 --epochs 1 --batch_size 2", *small)
    assert len(metrics(tmp_path / "output")) == 3
    checkpoint = tmp_path / "output/rank_0/checkpoint/mindformers_rank_0-3_1.ckpt"
    assert checkpoint.is_file()
    again = f"python run_mindformer.py --config configs/gpt2/run_gpt2.yaml --load_checkpoint {checkpoint} --run_mode"
    assert "perplexity" in run(tmp_path, f"{again} eval --eval_dataset_dir wiki", *small).out
    text = "I love Beijing, because"
    short = "--options model.model_config.max_decode_length=12"
    done = run(tmp_path, f"{again} predict --predict_data '{text}' {short}", *small)
    assert any(line.startswith(text) and line != text for line in done.out.splitlines())
    tune = "--num_samples 6 --epochs 1 --batch_size 2 --output_dir ./tuned"
    run(tmp_path, f"{again} finetune --dataset_dir wiki {tune}", *small)
    assert (tmp_path / "tuned/rank_0/checkpoint/mindformers_rank_0-3_1.ckpt").is_file()
    pytorch_model(tmp_path)
    run(tmp_path, CONVERT)
    assert (tmp_path / "mindspore_gpt2.ckpt").is_file()
