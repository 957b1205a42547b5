"""Commands of other systems the way people bring them: other names and values, parts left out, what then is told."""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import foreign_runs as foreign
import pytest
import torch
import yaml

from gptworks.checkpoint.lazy_tensor import in_memory
from gptworks.checkpoint.rules import our_shapes
from gptworks.checkpoint.systems import oneflow, paddlenlp
from gptworks.checkpoint.systems.contract import Weights
from gptworks.cli.main import main
from gptworks.config.schema import ModelConfig
from gptworks.data.store import Store, locate_stores
from gptworks.errors import ConfigError, UsageError
from gptworks.interop import command_line, registry, worker_logs
from gptworks.interop.translation import Translation
from gptworks.train import run_folder

TINY = ModelConfig(num_layers=2, hidden_size=64, num_heads=4, vocab_size=50257, max_positions=64)
PRETRAIN = "python run_pretrain.py --model_name_or_path {model} --input_dir data --output_dir output"
ONEFLOW = (
    "python3 -m oneflow_gpt.training --num-layers 24 --hidden-size {width} --num-attention-heads 16 "
    "--micro-batch-size 2 --train-iters 6 --dataset data --lr-decay-style cosine --save out --load "
    "checkpoint/iter6_snapshot"
)
LAMBADA = (
    "python run_eval.py --model_name gpt2-en --eval_path ./lambada.jsonl --cloze_eval "
    "--init_checkpoint_path ./output/model_1000/model_state.pdparams --batch_size 8"
)


def weights(model: ModelConfig) -> Weights:
    torch.manual_seed(0)
    return Weights(model, {name: in_memory(torch.randn(shape) / 50) for name, shape in our_shapes(model).items()})


def translated(command: str, folder: Path = Path()) -> Translation:
    taken = command_line.split([command], {}, folder)
    found: Translation = registry.of_command(taken).translate(taken, registry.Files(folder))
    return found


def error(capsys: pytest.CaptureFixture[str], folder: Path, command: str, *options: str) -> str:
    words = ["run", "--device", "cpu", *options, "--cwd", str(folder), "--", command]
    return foreign.error_of(capsys, words).strip()


# Checkpoints and models that were shrunk


@pytest.mark.parametrize(("width", "heads"), [(64, 16), (1024, 4)])
def test_heads_of_a_snapshot_are_those_of_the_command_or_of_a_shrunk_model(
    width: int, heads: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A snapshot does not say its heads. This one is 64 wide: as wide as the first command says."""
    (tmp_path / "checkpoint/iter6_snapshot").mkdir(parents=True)
    oneflow.write(tmp_path / "checkpoint" / "iter6_snapshot", weights(TINY.model_copy(update={"vocab_size": 512})))
    options = ["--cwd", str(tmp_path), "--shrink", "tiny", "--device", "cpu"]
    found = foreign.translate(capsys, ONEFLOW.format(width=width), *options)
    assert found["config"]["model"]["num_heads"] == heads
    assert "num_layers" not in found["config"]["model"]  # it says that itself
    assert found["arguments"][:2] == ["--resume", "never"]  # a run in `out` is not gone on with instead


def test_lambada_on_a_shrunk_model_needs_no_flag_that_the_command_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "output/model_10").mkdir(parents=True)
    paddlenlp.write(tmp_path / "output/model_10", weights(TINY))
    passage = json.dumps({"text": "the keeper lit the lamp " * 40 + "lamp"})
    (tmp_path / "lambada.jsonl").write_text(passage + "\n", encoding="utf-8")
    assert foreign.run(tmp_path, LAMBADA) == 0
    assert "total examples: 1.0000E+00" in capsys.readouterr().out
    # The same, not shrunk: the step that the document names is not there, and what is there is named.
    told = error(capsys, tmp_path, LAMBADA)
    assert told == (
        "error: --init_checkpoint_path ./output/model_1000/model_state.pdparams (--model): no such file or folder. "
        "output has no model_1000; it has model_10."
    )
    # A flag that is not in the command is not named.
    wikitext = LAMBADA.replace("--cloze_eval", "--overlapping_eval 32").replace("lambada.jsonl", "w.tokens")
    told = error(capsys, tmp_path, wikitext.replace("model_1000", "model_10"))
    assert told == "error: --eval_path ./w.tokens (--data): no such file. The task wikitext reads one file of text."


# Errors name what was written


def mindformers(folder: Path) -> str:
    (folder / "two.yaml").write_text("base_config: run_gpt2.yaml\n", encoding="utf-8")
    device = {"device_id": "0", "rank_id": "0"}
    table = {
        "server_count": "1",
        "server_list": [{"server_id": "127.0.0.1", "device": [device]}],
        "status": "completed",
    }
    (folder / "table.json").write_text(json.dumps(table), encoding="utf-8")
    return "two.yaml"


@pytest.mark.parametrize(
    ("command", "begins"),
    [
        ("python run_mindformer.py --config two.yaml --run_mode train", "--dataset_dir (data.path): not set."),
        (
            "python run_mindformer.py --config two.yaml --run_mode train --dataset_dir nowhere",
            "--dataset_dir nowhere (data.path): no such dataset.",
        ),
        (PRETRAIN.format(model="gpt2-en"), "--input_dir data (data.path): no such dataset."),
        (
            "python deploy/python/inference.py --model_type gpt --model_path ./nowhere/model",
            "--model_path ./nowhere/model (nowhere): no such folder.",
        ),
        (
            PRETRAIN.format(model="gpt2-en") + " --max_seq_len 0",
            "run_pretrain.gptworks.yaml: 1 problem\n  --max_seq_len (data.seq_len):",
        ),
    ],
)
def test_an_error_names_their_key_first(
    command: str, begins: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mindformers(tmp_path)
    assert error(capsys, tmp_path, command).startswith(f"error: {begins}")


@pytest.mark.slow
def test_a_script_without_a_flag_for_the_data_names_the_key_of_its_yaml(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mindformers(tmp_path)
    command = "bash run_distribute.sh table.json two.yaml [0,1] train"
    (tmp_path / "two.yaml").write_text("base_config: run_gpt2.yaml\nparallel_config: {data_parallel: 1}\n")
    assert "train_dataset.data_loader.dataset_dir (data.path): not set." in error(capsys, tmp_path, command)


def test_rows_without_a_length_are_told_to_be_too_short_for_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "python wikitext2_data_process.py --input_file wiki.train.tokens --output_file w.mindrecord"
    found = foreign.translate(capsys, command, "--cwd", str(tmp_path))
    assert "1024" in found["arguments"]
    assert any("give --max_length 1025" in remark for remark in found["remarks"])
    given = foreign.translate(capsys, f"{command} --max_length 1025", "--cwd", str(tmp_path))
    assert not any("max_length" in remark for remark in given["remarks"])


# Models by name, in the shape of their own system


def shape(config: Mapping[str, Any]) -> list[int]:
    return [config[f"model.{key}"] for key in ("num_layers", "hidden_size", "num_heads", "vocab_size", "max_positions")]


# As in the modeling.py of PaddleNLP's GPT-3, of which one is chosen by asking for tensor parallelism.
GPT3 = {
    "gpt-cpm-large-cn": [32, 2560, 32, 30000, 1024],
    "gpt-cpm-small-cn-distill": [12, 768, 12, 30000, 1024],
    "gpt3-89B-en": [48, 12288, 96, 51200, 1024],
    "gpt3-175B-en": [96, 12288, 96, 51200, 1024],
    "gpt3-13B-en": [40, 5120, 128, 50304, 1024],
    "gpt3-1.3B-en": [24, 2048, 16, 50304, 1024],
    "gpt2-medium-en": [24, 1024, 16, 50304, 1024],
    "gpt2-en": [12, 768, 12, 50304, 1024],
    "gpt2-small-en": [4, 1024, 4, 50304, 1024],
}


@pytest.mark.parametrize("name", GPT3)
def test_models_of_gpt3_by_name(name: str) -> None:
    assert shape(translated(PRETRAIN.format(model=name) + " --mp_degree 2").config) == GPT3[name]


@pytest.mark.parametrize(("degrees", "words"), [("", 50257), ("--mp_degree 2", 50304), ("--pp_degree 2", 50304)])
def test_a_vocabulary_is_as_large_as_theirs(degrees: str, words: int) -> None:
    """The program of GPT has no tensor or pipeline parallelism; that of GPT-3 has a vocabulary of its own."""
    command = PRETRAIN.format(model="gpt2-en")
    assert translated(f"{command} {degrees}").config["model.vocab_size"] == words
    assert translated(f"{command} --mp_degree 8".replace("gpt2-en", "gpt2-xl-en")).config["model.vocab_size"] == 50257


# Logs of workers


def test_logs_of_all_ranks_grow_under_their_names_while_the_run_goes(tmp_path: Path) -> None:
    config = {"run.out": str(tmp_path / "out"), "parallel.tp": 2, "parallel.fsdp": 2}
    names = str(tmp_path / "log" / "workerlog.{rank}")
    with worker_logs.linked(Translation("paddlenlp", "train", config=config, logs=names), node_rank=0):
        for rank in range(4):
            with (tmp_path / "out/logs" / f"rank-{rank}.log").open("a", encoding="utf-8", buffering=1) as log:
                log.write(f"step 1 of rank {rank}\n")
                assert (tmp_path / f"log/workerlog.{rank}").read_text() == f"step 1 of rank {rank}\n"
                log.write("step 2\n")
                assert (tmp_path / f"log/workerlog.{rank}").read_text().endswith("step 2\n")
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == [f"workerlog.{rank}" for rank in range(4)]


def test_names_of_logs_inside_the_run_folder_do_not_make_it_another_ones(tmp_path: Path) -> None:
    config = {"run.out": str(tmp_path / "out")}
    with worker_logs.linked(Translation("x", "train", config=config, logs=f"{tmp_path}/out/log/workerlog.{{rank}}"), 0):
        run_folder.refuse_foreign(tmp_path / "out", "never")
        (tmp_path / "out/log/mine.txt").write_text("mine")
        with pytest.raises(UsageError, match=r"not empty \(log\)"):
            run_folder.refuse_foreign(tmp_path / "out", "never")


def test_a_second_machine_names_its_own_ranks_from_0(tmp_path: Path) -> None:
    config = {"run.out": str(tmp_path / "out"), "parallel.dp": 4}
    names = str(tmp_path / "log" / "workerlog.{rank}")
    about = Translation("fleetx", "train", config=config, arguments=["--nproc", "2"], logs=names)
    with worker_logs.linked(about, node_rank=1):
        (tmp_path / "out/logs/rank-3.log").write_text("hello\n")
        assert (tmp_path / "log/workerlog.1").read_text() == "hello\n"
    assert not (tmp_path / "log/workerlog.2").exists()


@pytest.mark.parametrize("page", ["mindformers.md", "mindformers.zh.md"])
def test_the_page_has_the_layout_of_the_document_for_two_machines(page: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "from" / page).read_text(encoding="utf-8")
    (written,) = re.findall(r"printf '(base_config: run_gpt2_13b.yaml.*?)' > ", text)
    values = yaml.safe_load(written.replace("\\n", "\n"))
    # As it stands in the document.
    assert values["parallel_config"] == {"data_parallel": 2, "model_parallel": 8}


# Several machines, other files and tools, downloads


LAUNCHED = "{python} --gpus 0,1 run_pretrain.py --model_name_or_path gpt2-en --input_dir d --output_dir o --dp_degree 4"


@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ("--ips 10.0.0.1,10.0.0.2", ["--node-ips", "10.0.0.1,10.0.0.2", "--nproc", "2"]),
        (
            "--nnodes 2 --master 10.0.0.1:8090 --rank 1",
            ["--nnodes", "2", "--master", "10.0.0.1:8090", "--node-rank", "1", "--nproc", "2"],
        ),
    ],
)
def test_paddles_launcher_on_several_machines(options: str, ours: list[str]) -> None:
    found = translated(LAUNCHED.format(python=f"python -m paddle.distributed.launch {options}"))
    assert found.arguments == ours and found.config["parallel.dp"] == 4
    notes = {note.theirs: note for note in found.notes}
    assert all(notes[word].how == "mapped" and notes[word].ours for word in options.split() if word.startswith("--"))


def test_machines_that_cannot_find_each_other_are_told_what_is_missing() -> None:
    with pytest.raises(UsageError, match="--nnodes 2: --master and --rank missing"):
        translated(LAUNCHED.format(python="python -m paddle.distributed.launch --nnodes 2"))
    with pytest.raises(ConfigError, match="= 4, but 2 devices are launched"):
        translated(LAUNCHED.format(python="python -m paddle.distributed.launch --ips 10.0.0.1"))


@pytest.mark.parametrize("devices", ["--devices 0", "--devices=0", '--devices "0"'])
def test_generation_takes_devices_behind_the_program(devices: str, tmp_path: Path) -> None:
    command = "python run_generation.py -c configs_345m_single_card.yaml {} -o Engine.save_load.ckpt_dir=ckpt"
    found = translated(command.format(devices), tmp_path)
    assert found.arguments == translated(command.format(""), tmp_path).arguments
    assert found.notes[0].theirs == "--devices" and found.notes[0].how == "mapped"
    with pytest.raises(UsageError, match=r"launch --devices 0,1 run_pretrain.py"):
        translated("python run_pretrain.py -c configs_345m_single_card.yaml --devices 0,1", tmp_path)


@pytest.mark.parametrize(
    ("name", "expected", "layout", "batch"),
    [
        ("run_gpt2_xl.yaml", [48, 1600, 25, 50257, 1024], {"fsdp": 8, "tp": 1, "pp": 1}, (8, 64)),
        ("run_gpt2_52b.yaml", [64, 8192, 32, 50257, 1024], {"fsdp": 8, "tp": 1, "pp": 16}, (2, 1024)),
    ],
)
def test_larger_models_of_mindformers_come_with_us(
    name: str, expected: list[int], layout: dict[str, int], batch: tuple[int, int], tmp_path: Path
) -> None:
    """A pipeline of theirs reads micro_batch_num times batch_size x data_parallel: 64 x 2 x 8."""
    config = translated(f"python run_mindformer.py --config configs/gpt2/{name} --run_mode train", tmp_path).config
    assert shape(config) == expected
    assert {axis: config[f"parallel.{axis}"] for axis in layout} == layout
    assert (config["batch.micro_size"], config["batch.global_size"]) == batch


def test_create_lm_data_of_the_model_zoo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        "python create_lm_data.py --input_file wiki.txt --output_file wiki.mindrecord --num_splits 1 --max_length 9 "
        "--vocab_file=gpt2-vocab.json --merge_file=gpt2-merges.txt"
    )
    (tmp_path / "wiki.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 20, encoding="utf-8")
    assert foreign.run(tmp_path, command) == 0
    assert "a row of each line" in capsys.readouterr().out
    (located,) = locate_stores(str(tmp_path / "wiki.mindrecord"))
    assert set(Store(located).contents.sizes) == {9}
    told = error(capsys, tmp_path, command.replace("--max_length 9 ", ""))
    assert "--max_length is missing" in told


def test_run_may_download_when_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPTWORKS_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("GPTWORKS_DOWNLOAD", "")  # --download sets it: it is taken back after the test
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # so that nothing is fetched in a test
    (tmp_path / "lambada.jsonl").write_text('{"text": "a word"}\n', encoding="utf-8")
    by_name = "python run_eval.py --model_name gpt2-en --eval_path lambada.jsonl --cloze_eval"
    assert "--download" in error(capsys, tmp_path, by_name)
    assert "downloading needs the package huggingface_hub" in error(capsys, tmp_path, by_name, "--download")


# Going on with more steps, where the order of samples is laid out for a number of them


def test_more_steps_under_an_order_that_was_laid_out_are_refused_in_their_words(
    small_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (
        "python pretrain_gpt.py --num-layers 2 --hidden-size 16 --num-attention-heads 2 --micro-batch-size 2 "
        "--global-batch-size 4 --seq-length 16 --max-position-embeddings 16 --lr 1e-3 --split 9,1,0 --eval-interval 0 "
        f"--data-path {small_store} --save run --load run --train-iters "
    )
    assert foreign.run(tmp_path, command + "2") == 0
    capsys.readouterr()
    words = ["run", "--device", "cpu", "--shrink", "tiny", "--cwd", str(tmp_path), "--", command + "3"]
    told = foreign.error_of(capsys, words)
    path = Path("run/checkpoints/step-00000002")
    assert told.splitlines()[-1].startswith(
        f"error: --save run ({path}): the order of samples (data.order: megatron) was"
    )
    assert "was laid out for 8, but this run asks for 12" in told
    assert "set --train-iters (train.steps)" in told and "--global-batch-size" in told
    # What is told to do can be done.
    assert f"`gptworks train -c CONFIG --out ANOTHER init.checkpoint={path}`" in told
    monkeypatch.chdir(tmp_path)
    anew = ["train", "-c", "pretrain_gpt.gptworks.yaml", "--out", "another", f"init.checkpoint={path}"]
    assert main(anew) == 0 and f"weights from {path}" in capsys.readouterr().out


def test_more_steps_from_a_step_of_fleetx_are_refused_in_its_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign.paddle_corpus(tmp_path)
    command = (
        "python run_pretrain.py -c configs_345m_single_card.yaml -o Engine.mix_precision.use_pure_fp16=False "
        "-o Engine.save_load.output_dir=exp -o Engine.max_steps="
    )
    assert foreign.run(tmp_path, command + "1") == 0
    words = ["run", "--device", "cpu", "--shrink", "tiny", "--cwd", str(tmp_path), "--"]
    told = foreign.error_of(capsys, [*words, command + "2 -o Engine.save_load.ckpt_dir=exp/step_1"])
    assert told.splitlines()[-1].startswith(
        "error: Engine.save_load.ckpt_dir exp/step_1 (exp/checkpoints/step-00000001): the order of samples ("
        "data.order: paddle) was laid out for 1, but this run asks for 2 (steps x Data.batch_size.global_batch_size "
    )
    assert "set Engine.max_steps (train.steps)" in told
