"""Rules of the dialects that a document does not print but its system has: what a setting means, beside its name."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from foreign_runs import paddle_corpus

from gptworks.cli.main import main
from gptworks.config.load import flatten
from gptworks.errors import ConfigError
from gptworks.interop import command_line, fleetx, megatron, mindformers, paddlenlp, registry
from gptworks.interop.settings import Key, parse_bool, parse_float, parse_int
from gptworks.interop.translation import Translation

SMALL = "-o Model.vocab_size=512 -o Data.batch_size.global_batch_size=2 -o Data.batch_size.local_batch_size=2 "
SMALL += "-o Data.batch_size.micro_batch_size=2 "
FLEETX = "python run_pretrain.py -c configs_345m_single_card.yaml "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    paddle_corpus(tmp_path)
    return tmp_path


def translated(command: str, folder: Path = Path(), **environment: str) -> Translation:
    taken = command_line.split([command], environment, folder)
    found: Translation = registry.of_command(taken).translate(taken, registry.Files(folder))
    return found


def note(found: Translation, theirs: str) -> Any:
    return next(each for each in found.notes if each.theirs == theirs)


def run(folder: Path, command: str, *options: str) -> int:
    small = ["--device", "cpu", "--shrink", "tiny", "--cwd", str(folder)]
    return main(["run", *small, *options, "--", *shlex.split(command)])


# Names of checkpoints


@pytest.mark.slow
def test_a_checkpoint_that_is_trained_anew_is_written_anew_under_their_name(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = SMALL + "-o Engine.max_steps=4 -o Engine.save_load.save_steps=2 -o Engine.mix_precision.use_pure_fp16=False"
    assert run(folder, f"{FLEETX} {steps}") == 0
    weights = {step: next((folder / f"output/step_{step}").rglob("model.pdparams")) for step in (2, 4)}
    before = {step: path.read_bytes() for step, path in weights.items()}
    again = "-o Engine.save_load.ckpt_dir=./output/step_2 -o Optimizer.lr.max_lr=0.01"
    capsys.readouterr()
    assert run(folder, f"{FLEETX} {steps} {again}") == 0
    out = capsys.readouterr().out
    assert weights[2].read_bytes() == before[2] and weights[4].read_bytes() != before[4]
    assert "output/step_4: made from an earlier checkpoint; it is made anew." in out
    assert "output/step_2" not in out.split("made anew")[1]  # it stays as it is
    (folder / "output/foreign_names.json").unlink()  # as if others had written them
    assert run(folder, f"{FLEETX} {steps} -o Engine.save_load.ckpt_dir=./output/step_4") == 0
    out = capsys.readouterr().out
    assert "output/step_2: was not made from this run; it is output/step_2.before-1 now." in out
    assert (folder / "output/step_2.before-1").is_dir()


# Evaluation while training: how much of it a number means

MEGATRON = (
    "pretrain_gpt.py --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 16 --lr 1e-3 --data-path d "
)


def scored(found: Translation) -> tuple[int, int]:
    """(samples of an evaluation, steps between two)."""
    return found.config["evaluate.batches"] * found.config["batch.global_size"], found.config["evaluate.every"]


def test_eval_iters_counts_their_batches(folder: Path) -> None:
    layout = "-o Distributed.dp_degree=2 -o Distributed.sharding.sharding_degree=2 "
    sizes = {"global": 32, "local": 8, "micro": 4}
    layout += " ".join(f"-o Data.batch_size.{name}_batch_size={size}" for name, size in sizes.items())
    assert scored(translated(f"{FLEETX} {layout} -o Engine.eval_iters=3", folder)) == (3 * 32, 500)
    paddle = "python run_pretrain.py --model_type gpt --model_name_or_path gpt2-en --input_dir d --output_dir o "
    paddle += "--micro_batch_size 4 --dp_degree 2 --eval_iters 3 "
    assert scored(translated(paddle)) == (3 * 4 * 2, 500)
    rounded = translated(f"{paddle} --global_batch_size 16")  # theirs reads 24 samples, one and a half batches of ours
    assert scored(rounded) == (2 * 16, 500)
    (note,) = [note for note in rounded.notes if note.theirs == "--eval_iters"]
    assert note.how == "approximated" and "rounded up to whole batches" in note.why
    assert scored(translated(f"{paddle} --local_batch_size 8")) == (3 * 8 * 2, 500)
    megatron = f"torchrun --nproc_per_node 4 {MEGATRON} --train-iters 10 --eval-iters 3 --eval-interval 7"
    assert scored(translated(megatron)) == (3 * 16, 7)


def test_no_batches_are_no_evaluation(folder: Path) -> None:
    assert translated(f"python {MEGATRON} --train-iters 10 --eval-iters 0").config["evaluate.every"] == 0
    assert translated(f"{FLEETX} -o Engine.eval_iters=0", folder).config["evaluate.every"] == 0


# FleetX of 2023

OF_2023 = """
Global: {global_batch_size: 8, micro_batch_size: 8}
Optimizer:
Model: {vocab_size: 50304, num_layers: 2}
Distributed: {mp_degree: 2}
Data:
  Train:
    dataset: {input_dir: ./data, split: [949, 50, 1], max_seq_len: 64}
    sampler: {name: GPTBatchSampler, shuffle: False, drop_last: True}
  Eval:
    dataset: {input_dir: ./data/, split: [949, 50, 1], max_seq_len: 64, eos_id: 50256}
"""


def of_2023(folder: Path, *pairs: str) -> Translation:
    (folder / "mine.yaml").write_text(OF_2023, encoding="utf-8")
    return translated(f"python train.py -c mine.yaml {' '.join(f'-o {pair}' for pair in pairs)}", folder)


def test_of_2023_the_same_folder_is_the_same_however_it_is_written(folder: Path) -> None:
    assert "data.held_out_path" not in of_2023(folder).config
    other = of_2023(folder, "Data.Eval.dataset.input_dir=./other").config
    assert other["data.held_out_path"] == ("./other",)


def test_of_2023_the_vocabulary_is_padded_for_the_ranks_that_share_it(folder: Path) -> None:
    assert of_2023(folder).config["model.vocab_size"] == 50432
    assert of_2023(folder, "Distributed.mp_degree=1").config["model.vocab_size"] == 50304


@pytest.mark.parametrize(
    "pair",
    [
        "Data.Eval.dataset.split=[1,1,1]",
        "Data.Eval.dataset.max_seq_len=32",
        "Data.Eval.dataset.eos_id=7",
        "Data.Train.dataset.seed=99",
        "Data.Train.dataset.name=LM_Eval_Dataset",
        "Data.Train.sampler.shuffle=True",
        "Data.Train.sampler.drop_last=False",
        "Data.Test.dataset.input_dir=elsewhere",
        "Engine.run_mode=epoch",
    ],
)
def test_of_2023_what_is_not_the_same_is_said_to_be_ignored(pair: str, folder: Path) -> None:
    assert note(of_2023(folder, pair), pair.partition("=")[0]).how == "ignored"


def test_of_2023_what_is_the_same_is_not_said_to_be_ignored(folder: Path) -> None:
    given = ["Data.Train.dataset.seed=1024", "Engine.run_mode=step", "Data.Train.dataset.num_samples=5"]
    assert {each.how for each in of_2023(folder, *given).notes} == {"mapped"}


def test_an_empty_section_is_none(folder: Path) -> None:
    text = "Global:\nOptimizer: {}\nModel: {num_layers: 2}\nData: {batch_size: {global_batch_size: 8}}\n"
    (folder / "mine.yaml").write_text(text, encoding="utf-8")
    found = translated("python run_pretrain.py -c mine.yaml", folder)
    assert {each.theirs for each in found.notes} == {"Model.num_layers", "Data.batch_size.global_batch_size"}


def test_fused_tensors_decay_biases_there_and_it_is_told(folder: Path) -> None:
    fused = note(translated(f"{FLEETX} -o Fused.tensor_fusion=True", folder), "Fused.tensor_fusion")
    assert fused.how == "approximated" and "biases" in fused.why
    assert note(translated(FLEETX, folder), "Fused.tensor_fusion").how == "mapped"


def test_every_key_of_the_file_has_a_note_when_text_is_generated(folder: Path) -> None:
    command = "python -m paddle.distributed.launch --devices 0 run_generation.py -c configs_345m_single_card.yaml"
    found = translated(f"{command} -o Engine.save_load.ckpt_dir=./ckpt", folder)
    in_file = set(flatten(fleetx.read_yaml(registry.Files(folder)("configs_345m_single_card.yaml"))))
    told = [each.theirs for each in found.notes]
    assert set(told) == in_file | {"--devices"} and len(told) == len(set(told))


def test_one_beam_is_no_beam_search(folder: Path) -> None:
    beams = "-o Generation.decode_strategy=beam_search -o Generation.num_beams="
    told = note(translated(f"{FLEETX} {beams}1", folder), "Generation.num_beams")
    assert (told.how, told.ours) == ("approximated", "generate.num_beams=2")
    assert note(translated(f"{FLEETX} {beams}3", folder), "Generation.num_beams").how == "mapped"


# Megatron-LM, nanoGPT, and torchrun in front of them


def test_a_warmup_is_a_share_of_the_decay_and_may_end_between_steps() -> None:
    samples = f"python {MEGATRON} --train-samples 1600000 --lr-decay-samples 800000 --lr-warmup-fraction .01"
    samples = samples.replace("--global-batch-size 16", "--global-batch-size 8")
    found = translated(samples)
    assert found.config["optim.warmup_steps"] == 1000 and found.config["optim.decay_steps"] == 100000
    assert note(found, "--lr-warmup-fraction").ours == "optim.warmup_steps=1000"
    steps = translated(f"python {MEGATRON} --train-iters 100 --lr-warmup-fraction .29").config
    assert steps["optim.warmup_steps"] == pytest.approx(29)


def test_a_fixed_loss_scale_is_not_quite_theirs() -> None:
    found = translated(f"python {MEGATRON} --train-iters 9 --fp16 --loss-scale 128")
    assert note(found, "--loss-scale").how == "approximated"


MACHINES = "torchrun --nproc_per_node=8 --nnodes=2 --node_rank=1 --master_addr=10.0.0.1 --master_port=1234 "


@pytest.mark.parametrize(
    "program",
    [
        "train.py --gradient_accumulation_steps=16",
        MEGATRON.replace("-size 16 --lr", "-size 32 --lr") + "--train-iters 9",
    ],
)
def test_torchrun_on_two_machines(program: str) -> None:
    found = translated(MACHINES + program)
    assert found.config["parallel.dp"] == 16
    given = dict(zip(found.arguments[::2], found.arguments[1::2], strict=True))
    assert given == {
        "--resume": "never", "--nproc": "8", "--nnodes": "2", "--node-rank": "1", "--master": "10.0.0.1:1234",
    }  # fmt: skip
    launcher = {word.partition("=")[0] for word in MACHINES.split()[1:]}
    assert launcher <= {each.theirs for each in found.notes}


def test_torchruns_other_options_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    found = translated(f"torchrun --standalone --max_restarts 3 --nproc_per_node 2 {MEGATRON} --train-iters 9")
    assert found.config["parallel.dp"] == 2 and found.arguments[-2:] == ["--max-restarts", "3"]
    assert main(["translate", "--", f"torchrun --nproc_per_node=gpu {MEGATRON} --train-iters 9"]) == 2
    assert "--nproc_per_node=gpu: say how many" in capsys.readouterr().err.replace("nproc-per-node", "nproc_per_node")


# PaddleNLP and Paddle's launcher

PADDLE = "--model_type gpt --model_name_or_path gpt2-en --input_dir d --output_dir o "
LAUNCH = "python -m paddle.distributed.launch "


def test_paddles_static_program_shrinks_its_scale_less() -> None:
    assert translated(f"python run_pretrain_static.py {PADDLE}").config["precision.scaler.backoff"] == 0.8
    assert "precision.scaler.backoff" not in translated(f"python run_pretrain.py {PADDLE}").config


def test_chinese_data_are_masked_too() -> None:
    chinese = PADDLE.replace("--model_type gpt ", "--model_type gpt-cn ").replace("gpt2-en", "gpt-cpm-small-cn-distill")
    config = translated(f"python run_pretrain.py {chinese}").config
    assert config["data.mask_eod"] is True and "data.tokenizer" not in config


def test_without_a_decay_there_is_no_warmup_and_no_note_of_one() -> None:
    found = translated(f"python run_pretrain.py {PADDLE} --lr_decay_style none --warmup_rate 0.01")
    assert found.config["optim.warmup_steps"] == 0 and note(found, "--warmup_rate").how == "ignored"


def test_an_overlap_that_is_not_passed_on_is_not_said_to_be() -> None:
    found = translated("python run_eval.py --model_name gpt2-en --eval_path l.jsonl --cloze_eval --overlapping_eval 32")
    assert "--overlap" not in found.arguments and note(found, "--overlapping_eval").how == "ignored"


def test_a_script_takes_no_words_and_its_own_settings_win(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("task_name", "of-somebody-else")
    script = (
        f"export task_name=gpt3-test\npython run_pretrain.py {PADDLE.replace('output_dir o', 'output_dir $task_name')}"
    )
    (tmp_path / "run.sh").write_text(script)
    assert translated("sh run.sh", tmp_path).config["run.out"] == "gpt3-test"
    assert main(["translate", "--cwd", str(tmp_path), "--", "sh run.sh 8 --max_steps 3"]) == 2
    assert "8 --max_steps 3 behind it" in capsys.readouterr().err


def test_paddles_launcher_without_devices_starts_what_the_degrees_need() -> None:
    found = translated(f"{LAUNCH} run_pretrain.py {PADDLE} --mp_degree 8 --global_batch_size 8")
    assert found.config["parallel.tp"] == 8 and any("names no devices" in remark for remark in found.remarks)


def test_paddles_launcher_may_start_again() -> None:
    launch = f"{LAUNCH} --devices 0,1 --max_restart 3 --elastic_level -1 --elastic_timeout 30 --auto_tuner_json t.json "
    found = translated(f"{launch} run_pretrain.py {PADDLE} --dp_degree 2")
    assert found.arguments == ["--max-restarts", "3"]
    given = {word for word in launch.split() if word.startswith("--")}
    assert given <= {each.theirs for each in found.notes}


def test_paddles_launcher_has_notes_before_every_program() -> None:
    found = translated(f"{LAUNCH} --gpus 0 run_eval.py --model_name gpt2-en --eval_path l.jsonl --cloze_eval")
    assert note(found, "--gpus").why == "one process does it"


# MindFormers


def of_mindformers(folder: Path, more: str = "") -> Translation:
    command = f"python run_mindformer.py --config configs/gpt2/run_gpt2.yaml --run_mode train --dataset_dir rows {more}"
    return translated(command, folder)


def test_mindformers_does_not_score_what_follows_an_end(tmp_path: Path) -> None:
    found = of_mindformers(tmp_path)
    assert found.config["data.mask_eod"] is True
    assert note(found, "model.model_config.eos_token").ours == "data.mask_eod=true"
    assert any("hides that token from attention" in remark for remark in found.remarks)
    other = note(of_mindformers(tmp_path, "--options model.model_config.eos_token=7"), "model.model_config.eos_token")
    assert other.how == "approximated" and "theirs looks for" in other.why


def test_mindformers_draws_its_embeddings_in_another_way(tmp_path: Path) -> None:
    told = note(of_mindformers(tmp_path), "model.model_config.initializer_range")
    assert told.how == "approximated" and "0.02" in told.why


# OneFlow


@pytest.mark.parametrize(
    ("name", "micro"),
    [("4n8d_8x1x4_512_1536x16", 2), ("1n8d_1x8x1_16_1536x16", 16), ("1n8d_2x4x1_16_1536x16", 8),
     ("4n8d_2x4x4_512_2304x24", 8)],
)  # fmt: skip
def test_the_micro_batch_of_a_script_is_that_of_their_table(name: str, micro: int, tmp_path: Path) -> None:
    addresses = "ONEFLOW_GPT_NODE_IPS=a,b,c,d"
    found = translated(f"{addresses} bash examples/pretrain_{name}.sh", tmp_path)
    assert found.config["batch.micro_size"] == micro


# The commands `run` and `translate` themselves


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(list(words)) == 0
    return capsys.readouterr().out


def test_a_command_in_one_text_may_end_in_a_files_name(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, "translate", "--", "python run_pretrain.py -c ./configs_345m_single_card.yaml")
    assert "# Translated from fleetx." in out and "num_layers: 24" in out


def test_translate_needs_no_device_and_finds_the_documents_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = said(capsys, "translate", "--cwd", str(tmp_path), "configs/gpt2/run_gpt2.yaml")
    assert 'device: "auto"' in out and "asks for Ascend, which torch cannot serve" in out
    out = said(capsys, "translate", "--cwd", str(tmp_path), "configs_345m_single_card.yaml")
    assert "comes with gptworks" in out and "num_layers: 24" in out


def test_what_has_no_configuration_is_translated_with_its_notes_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = said(
        capsys, "translate", "--", "python", "sample.py", "--start=It's\n$five", "--device=cpu", "--dtype=float16"
    )
    lines = out.splitlines()
    assert all(line.startswith("# ") for line in lines)
    assert "# dtype=float16: ignored, weights are fp32; --weights bf16 keeps them so" in lines
    assert r"--prompt $'It\'s\n$five' " in lines[-1] and lines[-1].startswith("# gptworks generate --model")
    read = (
        "python -u create_pretraining_data.py --input_path 'my texts' --output_prefix p --tokenizer_name GPTTokenizer"
    )
    assert "prepare 'my texts' --out p" in said(capsys, "translate", "--", read)


def test_dry_run_checks_the_configuration(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, FLEETX, "--dry-run") == 0
    heads = f"{FLEETX} -o Model.num_attention_heads=7"
    assert main(["run", "--cwd", str(folder), "--dry-run", "--", heads]) == 2
    assert "num_heads" in capsys.readouterr().err


def test_strict_takes_what_the_documents_print(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "translate", "--strict", "--cwd", str(tmp_path), "--", "bash example/pretrain_345M.sh")
    convert = "python mindformers/models/gpt2/convert_weight.py --layers 12 --torch_path p.bin --mindspore_path m.ckpt"
    said(capsys, "translate", "--strict", "--", convert)


def test_flags_of_paddles_tools_are_known() -> None:
    flags = "--input_path in --output_prefix out --tokenizer_name GPTTokenizer --data_format JSON"
    for program in ("create_pretraining_data.py --cn_seg_func jieba --cn_splited", "preprocess_data.py"):
        found = translated(f"python {program} {flags}")
        assert (found.system, found.verb, found.arguments[:3]) == ("paddlenlp", "prepare", ["in", "--out", "out"])


def test_a_number_in_an_override_is_a_place_in_a_list(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.yaml").write_text(OF_2023 + "Profiler: {enable: True, scheduler: [1, 5]}\n", encoding="utf-8")
    command = "python train.py -c mine.yaml -o Profiler.scheduler."
    assert translated(f"{command}0=2", folder).config["train.profile"] == (2, 4)
    assert main(["translate", "--cwd", str(folder), "--", f"{command}2=7"]) == 2
    assert "Profiler.scheduler has 2 values" in capsys.readouterr().err


def test_a_dollar_between_single_quotes_is_a_dollar() -> None:
    text = "python sample.py --start='It costs $five' --out_dir=$place --device=\"c$kind\""
    taken = command_line.split([text], {"place": "here", "kind": "pu"}, Path())
    assert taken.arguments == ["--start=It costs $five", "--out_dir=here", "--device=cpu"]
    taken = command_line.split(["a=1", "python", "sample.py", "--start=It costs $five", "--out_dir=$a"], {}, Path())
    assert taken.arguments == ["--start=It costs $five", "--out_dir=1"]
    assert command_line.split([r"python sample.py --start=\$five"], {}, Path()).arguments == ["--start=$five"]


# Each key of a table that is neither `same` nor ignored decides something: of the values tried, one changes the run

KINDS: dict[Any, list[str]] = {
    parse_int: ["1", "2", "3", "4", "8", "64"],
    parse_float: ["0.5", "0.125", "2"],
    parse_bool: ["true", "false"],
}
# The other words of a key, and what must stand beside it (None: must not).
OTHER_WORDS = {
    "--model_type": ["gpt-cn"], "--model_name_or_path": ["gpt2-medium-en"], "--input_dir": ["e"], "--output_dir": ["e"],
    "--split": ["1,1,1"], "--lr_decay_style": ["none"], "--recompute_granularity": ["core_attn"], "--device": ["cpu"],
    "-p": ["batch_range=[1,2]"], "--profiler_options": ["batch_range=[1,2]"],
    "--rampup-batch-size": [], "--data-path": ["e"], "--lr-decay-style": ["cosine"], "--load": ["."], "--save": ["e"],
    "--recompute-granularity": ["selective"], "--vocab-file": [],
    "Global.device": ["cpu"], "Data.dataset.input_dir": ["e"], "Data.dataset.split": ["1,1,1"],
    "Data.Train.dataset.input_dir": ["e"], "Data.Train.dataset.split": ["1,1,1"], "Data.Eval.dataset.input_dir": ["e"],
    "Engine.mix_precision.dtype": ["bfloat16"], "Engine.save_load.output_dir": ["e"], "Profiler.scheduler": ["2,9"],
    "Engine.save_load.ckpt_dir": ["e"], "Model.recompute_granularity": ["core_attn"],
    "Generation.decode_strategy": ["greedy_search"],
    "run_mode": ["finetune"], "output_dir": ["e"], "load_checkpoint": ["e"], "resume_or_finetune_checkpoint": ["e"],
    "context.device_target": ["CPU"], "parallel.parallel_mode": ["1"], "optimizer.betas": ["[0.1,0.2]"],
    "runner_wrapper.scale_sense.type": ["DynamicLossScaleUpdateCell"], "lr_schedule.type": ["cosine"],
    "callbacks.CheckpointMointor": [""], "callbacks.CheckpointMointor.prefix": ["e"],
    "callbacks.CheckpointMointor.directory": ["e"], "train_dataset.data_loader.dataset_dir": ["e"],
    "model.model_config.hidden_act": ["fast_gelu"], "model.model_config.compute_dtype": ["float32"],
    "model.model_config.checkpoint_name_or_path": ["e", "f"],
}  # fmt: skip


def idle(keys: list[Key], read: Callable[[dict[str, str]], Translation], beside: dict[str, dict[str, str]]) -> set[str]:
    """Keys said to become something of ours whose value changes nothing. `beside`: what makes them count."""
    left = set()
    for key in [key for key in keys if not (key.same_effect or key.ignored_because)]:
        with_it, means, claims = beside.get(key.theirs, {}), set(), False
        values = [""] if key.switch else OTHER_WORDS.get(key.theirs) or KINDS.get(key.read, ["x", "y"])
        for value in [None, *values]:
            try:
                found = read(with_it if value is None else {**with_it, key.theirs: value})
            except ConfigError:  # it does not go with the rest
                continue
            means.add(repr((found.verb, found.config, found.arguments, found.after, found.device)))
            claims = claims or any(note.ours for note in found.notes if note.theirs == key.theirs)
        if claims and len(means) < 2:
            left.add(key.theirs)
    return left


def test_every_mapped_flag_of_paddlenlp_decides_something() -> None:
    base = "python run_pretrain.py --model_type gpt --model_name_or_path gpt2-en --input_dir d --output_dir o"

    def read(more: dict[str, str]) -> Translation:
        return translated(f"{base} {' '.join(f'{flag} {text}' for flag, text in more.items())}")

    beside = {"--sharding_stage": {"--sharding_degree": "2"}, "--use_sharding": {"--sharding_degree": "2"}}
    beside["--recompute_granularity"] = {"--use_recompute": "true"}
    assert idle(paddlenlp.TRAINING, read, beside) == set()


def test_every_mapped_flag_of_megatron_decides_something() -> None:
    base = f"torchrun --nproc_per_node 2 {MEGATRON} --num-layers 4 --save s"

    def read(more: dict[str, str]) -> Translation:
        length = "" if "--train-samples" in more else "--train-iters 90"
        return translated(f"{base} {length} {' '.join(f'{flag} {text}' for flag, text in more.items())}")

    beside = {"--min-lr": {"--lr": "9"}, "--lr-warmup-samples": {"--train-samples": "99"}}
    assert idle(megatron.TRAINING, read, beside) == set()


def test_every_mapped_key_of_fleetx_decides_something() -> None:
    def read(more: dict[str, str]) -> Translation:
        values = {"Data.batch_size.global_batch_size": "8", "Data.batch_size.micro_batch_size": "1", **more}
        return fleetx.translate_values(values, "x")

    searching = {"Generation.decode_strategy": "beam_search"}
    beside = {f"Generation.{key}": searching for key in ("num_beams", "length_penalty", "early_stopping")}
    beside |= {
        "Distributed.sharding.sharding_stage": {"Distributed.sharding.sharding_degree": "2"},
        "Data.batch_size.local_batch_size": {"Data.batch_size.global_batch_size": ""},
        "Global.local_batch_size": {"Data.batch_size.global_batch_size": ""},
        "Model.vocab_size_divisible_unit": {"Model.vocab_size": "50257"},
        "Profiler.scheduler": {"Profiler.enable": "true"},
    }
    assert idle(fleetx.KEYS, read, beside) == set()


def test_every_mapped_key_of_mindformers_decides_something() -> None:
    def read(more: dict[str, str]) -> Translation:
        saving = {"callbacks.CheckpointMointor": ""}
        return mindformers._translate({**saving, **more}, {}, {}, "x", None)

    many = {"use_parallel": "True", "parallel.parallel_mode": "1"}
    beside: dict[str, dict[str, str]] = {
        **dict.fromkeys(("use_parallel", "parallel_config.data_parallel", "parallel_config.model_parallel"), many),
        "use_parallel": {"parallel_config.data_parallel": "2"},
        "parallel_config.pipeline_stage": many,
        "parallel.parallel_mode": {"use_parallel": "True", "parallel_config.model_parallel": "2"},
        "parallel.enable_parallel_optimizer": {**many, "parallel_config.data_parallel": "2"},
        "parallel_config.optimizer_shard": {**many, "parallel_config.data_parallel": "2"},
        "parallel_config.micro_batch_num": {
            **many, "parallel_config.pipeline_stage": "2", "runner_config.batch_size": "8",
        },
        "lr_scale_factor": {"lr_scale": "True"},
        "profile_start_step": {"profile": "True"},
        "profile_stop_step": {"profile": "True"},
        "runner_wrapper.max_grad_norm": {"runner_wrapper.use_clip_grad": "True"},
        "runner_wrapper.scale_sense.scale_factor": {"runner_wrapper.scale_sense.type": "DynamicLossScaleUpdateCell"},
        "model.model_config.checkpoint_name_or_path": {"run_mode": "finetune", "load_checkpoint": ""},
        "resume_training": {"load_checkpoint": "e"},
    }  # fmt: skip
    exempt = {
        "callbacks.CheckpointMointor",  # has no value
        "lr_schedule.warmup_lr_init", "model.model_config.initializer_range",  # approximated by what is done anyway
        "model.model_config.eos_token", "model.model_config.eos_token_id",  # the token of the tokenizer counts
        "resume_training",  # of an own run only
    }  # fmt: skip
    assert idle(mindformers.KEYS, read, beside) == exempt


@pytest.mark.parametrize("text", ["1e999", "-inf", "nan", "2.5"])
def test_a_number_that_is_not_whole_is_an_error_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match=rf"got {text}; needs a whole number"):
        parse_int(text)
