"""nanoGPT's train.py, sample.py and prepare.py as its README starts them. Row of the conformance list: W-06."""

import io
import json
import math
import pickle
import shutil
from pathlib import Path

import foreign_runs as foreign
import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gptworks.checkpoint.systems import registry
from gptworks.cli.main import main
from gptworks.config.load import from_dict
from gptworks.interop import nanogpt
from gptworks.train import schedule

# The README's command for a computer without a GPU.
TRAIN = (
    "python train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1 "
    "--block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 "
    "--dropout=0.0"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, corpus_file: Path) -> Path:
    """As their prepare.py leaves it: characters, nine tenths and a tenth, and a pickle with the vocabulary."""
    made = tmp_path_factory.mktemp("nanogpt")
    place = made / "data" / "shakespeare_char"
    place.mkdir(parents=True)
    text = corpus_file.read_text(encoding="utf-8")
    numbers = {letter: number for number, letter in enumerate(sorted(set(text)))}
    tokens = np.array([numbers[letter] for letter in text], np.uint16)
    cut = len(tokens) * 9 // 10
    tokens[:cut].tofile(place / "train.bin")
    tokens[cut:].tofile(place / "val.bin")
    meta = {"vocab_size": len(numbers), "stoi": numbers, "itos": {n: letter for letter, n in numbers.items()}}
    (place / "meta.pkl").write_bytes(pickle.dumps(meta))
    (place / "size").write_text(str(len(numbers)), encoding="utf-8")
    return made


def test_w_06_training_on_characters_runs_and_leaves_ckpt_pt(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert foreign.run(folder, TRAIN) == 0
    assert "config/train_shakespeare_char.py is not here" in capsys.readouterr().out
    found = foreign.losses(folder / "out-shakespeare-char")
    assert len(found) == 10 and found[-1][1] < found[0][1]
    assert foreign.train_again(folder, "train.gptworks.yaml", "again") == found
    file = folder / "out-shakespeare-char" / "ckpt.pt"
    saved = torch.load(file, weights_only=True)
    assert saved["model_args"]["n_layer"] == 2 and saved["iter_num"] == 10
    opened = registry.open_any(file, {})
    assert opened.model.vocab_size == int((folder / "data" / "shakespeare_char" / "size").read_text(encoding="utf-8"))
    assert foreign.run(folder, f"{TRAIN} --init_from=resume") == 0  # nothing left to do; the file is made anew
    assert torch.load(file, weights_only=True)["iter_num"] == 10


def test_every_setting_is_noted_of_the_file_and_of_the_command(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = foreign.translate(capsys, TRAIN, "--cwd", str(folder))
    said = {flag.removeprefix("--") for flag in foreign.flags_in(TRAIN)}
    assert foreign.noted(found) == said | set(nanogpt.RECIPES["train_shakespeare_char.py"])
    config = found["config"]
    assert config["data"]["path"] == ["data/shakespeare_char/train.bin"]
    assert config["data"]["held_out_path"] == ["data/shakespeare_char/val.bin"]
    assert config["model"]["num_layers"] == 4 and config["model"]["gelu"] == "erf" and config["optim"]["beta2"] == 0.99
    assert config["precision"]["compute"] == "fp32" and config["train"]["seed"] == 1337
    assert config["checkpoint"] == {"every": 250, "keep_best": True}


def test_defaults_are_theirs_and_gpt2_on_eight_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    config = foreign.translate(capsys, "torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py")[
        "config"
    ]
    assert config["batch"] == {"micro_size": 12, "global_size": 480} and config["parallel"] == {"dp": 8}
    assert config["train"]["steps"] == 600000 and config["train"]["compile"] is True
    assert config["optim"]["lr"] == 6e-4 and config["optim"]["min_lr"] == 6e-5
    assert config["model"]["vocab_size"] == 50304 and config["precision"]["compute"] == "bf16"
    assert config["data"]["path"] == ["data/openwebtext/train.bin"] and config["data"]["tokenizer"] == "gpt2"


def test_the_learning_rate_is_nanogpts_at_every_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"{TRAIN} --max_iters=60 --lr_decay_iters=40 --warmup_iters=7 --learning_rate=0.01 --min_lr=0.001"
    cfg = from_dict({"optim": foreign.translate(capsys, command, "--cwd", str(folder))["config"]["optim"]})

    def theirs(n: int) -> float:
        if n < 7:
            return 0.01 * (n + 1) / 8
        if n > 40:
            return 0.001
        return 0.001 + 0.5 * (1 + math.cos(math.pi * (n - 7) / 33)) * 0.009

    rates = [schedule.lr_at(step, cfg.optim, 60) for step in range(1, 61)]
    assert rates == pytest.approx([theirs(n) for n in range(60)], rel=1e-12)


OTHER_VALUES = {
    "out_dir": "x", "eval_interval": "3", "log_interval": "3", "eval_iters": "3", "always_save_checkpoint": "True",
    "init_from": "resume", "dataset": "x", "gradient_accumulation_steps": "4", "batch_size": "4", "block_size": "32",
    "n_layer": "3", "n_head": "2", "n_embd": "64", "dropout": "0.5", "learning_rate": "1", "max_iters": "7",
    "weight_decay": "0", "beta1": "0.5", "beta2": "0.5", "grad_clip": "0", "decay_lr": "False", "warmup_iters": "7",
    "lr_decay_iters": "7", "min_lr": "0", "device": "cuda", "dtype": "float16", "compile": "True",
}  # fmt: skip


@pytest.mark.parametrize("key", sorted(OTHER_VALUES))
def test_changing_a_mapped_key_changes_the_configuration(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = f"{TRAIN} --device=cuda" if key == "dtype" else TRAIN
    before = foreign.translate(capsys, base)
    after = foreign.translate(capsys, f"{base} --{key}={OTHER_VALUES[key]}")
    assert json.dumps([before["config"], before["arguments"]]) != json.dumps([after["config"], after["arguments"]])


def test_every_key_that_is_mapped_is_in_that_test() -> None:
    free = {key.theirs for key in nanogpt.TRAINING if key.ignored_because or key.same_effect} | {"eval_only", "bias"}
    assert {key.theirs for key in nanogpt.TRAINING} == set(OTHER_VALUES) | free


def test_a_file_of_settings_is_read_and_never_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trap = tmp_path / "trap"
    (tmp_path / "mine.py").write_text(
        f'"""Mine."""\nimport time\nn_layer = 2 * 3\nmax_iters = 50\nlr_decay_iters = max_iters\n'
        f"wandb_run_name = 'ft-' + str(open({str(trap)!r}, 'w'))\n",
        encoding="utf-8",
    )
    config = foreign.translate(capsys, "python train.py mine.py --n_head=6", "--cwd", str(tmp_path))["config"]
    assert config["model"]["num_layers"] == 6 and config["optim"]["decay_steps"] == 51
    assert not trap.exists()
    (tmp_path / "bad.py").write_text(f"n_layer = int(open({str(trap)!r}, 'w').name)\n", encoding="utf-8")
    told = foreign.error_of(capsys, ["translate", "--cwd", str(tmp_path), "--", "python train.py bad.py"])
    assert "n_layer" in told and "it is not run" in told and not trap.exists()
    (tmp_path / "bad.py").write_text("if True:\n    n_layer = 2\n", encoding="utf-8")
    told = foreign.error_of(capsys, ["translate", "--cwd", str(tmp_path), "--", "python train.py bad.py"])
    assert "line 1: needed KEY = VALUE" in told


def test_mistakes_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    told = foreign.error_of(capsys, ["translate", "--", "python train.py --n_layers=3"])
    assert "n_layers: unknown; did you mean n_layer?" in told
    assert "--key=value" in foreign.error_of(capsys, ["translate", "--", "python train.py --n_layer"])
    told = foreign.error_of(capsys, ["translate", "--strict", "--", "python train.py --wandb_log=True"])
    assert "wandb_log: ignored" in told
    told = foreign.error_of(capsys, ["translate", "--", "torchrun --nproc_per_node=7 train.py"])
    assert "gradient_accumulation_steps: 40" in told


def test_fine_tuning_starts_from_the_named_model(capsys: pytest.CaptureFixture[str]) -> None:
    config = foreign.translate(capsys, "python train.py config/finetune_shakespeare.py")["config"]
    assert config["init"]["checkpoint"] == "gpt2-xl" and "num_layers" not in config["model"]
    assert config["optim"]["schedule"] == "constant" and config["batch"]["global_size"] == 32


def test_prepare_train_and_sample_as_one_story(
    tmp_path: Path, corpus_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "data" / "shakespeare_char"
    told = foreign.error_of(capsys, ["run", "--cwd", str(tmp_path), "--", "python data/shakespeare_char/prepare.py"])
    assert "input.txt is not here" in told
    place.mkdir(parents=True)
    (place / "input.txt").write_text(corpus_file.read_text(encoding="utf-8"), encoding="utf-8")
    assert foreign.run(tmp_path, "python data/shakespeare_char/prepare.py") == 0
    assert (place / "train.bin").is_file()
    assert foreign.run(tmp_path, f"{TRAIN} --max_iters=3") == 0
    capsys.readouterr()
    sample = (
        "python sample.py --out_dir=out-shakespeare-char --device=cpu --num_samples=2 --max_new_tokens=5 --start=The"
    )
    assert main(["run", "--cwd", str(tmp_path), "--", sample]) == 0
    told = capsys.readouterr().out
    assert told.count("\nThe") == 2 and "--num-return-sequences 2" in told
    letters = sorted(set(corpus_file.read_text(encoding="utf-8")))
    assert len(letters) < 200 and "--top-k 0" in told, "their top_k of 200 keeps all there are"
    assert registry.open_any(tmp_path / "out-shakespeare-char" / "ckpt.pt", {}).model.vocab_size == len(letters)


def test_data_with_its_meta_pkl_trains_and_then_writes_text_as_pasted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "data", tmp_path / "data")
    sample = (
        "python sample.py --out_dir=out-shakespeare-char --device=cpu --num_samples=2 --max_new_tokens=8 --start=An"
    )
    monkeypatch.setattr("sys.stdin", io.StringIO(f"$ {TRAIN} --max_iters=3\n$ {sample}\n"))
    assert main(["run", "--device", "cpu", "--shrink", "tiny", "--cwd", str(tmp_path), "-"]) == 0
    told = capsys.readouterr().out
    texts = told.rpartition("$ gptworks generate")[2].partition("\n\n")[2].split("---\n")
    letters = set(pickle.loads((folder / "data" / "shakespeare_char" / "meta.pkl").read_bytes())["stoi"])
    assert [len(text.removesuffix("\n")) for text in texts] == [10, 10] and set("".join(texts)) <= letters | {"\n"}


def test_a_checkpoint_of_theirs_writes_with_the_characters_of_its_dataset(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "data", tmp_path / "data")
    size = int((folder / "data" / "shakespeare_char" / "size").read_text(encoding="utf-8"))
    model = GPT2LMHeadModel(GPT2Config(vocab_size=size, n_embd=8, n_head=2, n_layer=1, n_positions=16)).state_dict()
    flipped = ("attn.c_attn.weight", "c_proj.weight", "mlp.c_fc.weight")
    state = {name: (each.T if name.endswith(flipped) else each).clone() for name, each in model.items()}
    numbers = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 16, "bias": True, "vocab_size": size}
    (tmp_path / "out").mkdir()
    content = {"model": state, "model_args": numbers, "iter_num": 3, "config": {"dataset": "shakespeare_char"}}
    torch.save(content, tmp_path / "out" / "ckpt.pt")
    sample = "python sample.py --device=cpu --num_samples=1 --max_new_tokens=5 --start=An"
    assert main(["run", "--cwd", str(tmp_path), "--", sample]) == 0
    told = capsys.readouterr().out
    assert "--tokenizer data/shakespeare_char/meta.pkl" in told and "--top-k 0" in told
    content["config"] = {"dataset": "openwebtext"}
    torch.save(content, tmp_path / "out" / "ckpt.pt")
    told = foreign.translate(capsys, sample, "--cwd", str(tmp_path))
    assert told["arguments"][2:4] == ["--tokenizer", "gpt2"]


def test_sample_py_in_our_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "python sample.py --init_from=gpt2-xl --start=What --num_samples=5 --max_new_tokens=100"
    found = foreign.translate(capsys, command)
    assert foreign.noted(found) == {"init_from", "start", "num_samples", "max_new_tokens"}
    words = found["arguments"]
    assert words[:4] == ["--model", "gpt2-xl", "--prompt", "What"] and words[words.index("--top-k") + 1] == "200"
    (tmp_path / "p.txt").write_text("Once\nupon", encoding="utf-8")
    found = foreign.translate(capsys, "python sample.py --start=FILE:p.txt", "--cwd", str(tmp_path))
    assert found["arguments"][1:4] == ["out/ckpt.pt", "--prompt", "Once\nupon"]
