"""The blocks of the five documents themselves, with their comments and `cd` lines, pasted in their order in one folder.

What a document says to download lies there under its name, and is small. Where a block names the path of a reader or a
number of devices, those are put in, as a reader would.
"""

import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import foreign_runs as foreign
import pytest
import torch
import yaml
import zstandard
from home_folder import own_home
from transformers import GPT2Config, GPT2LMHeadModel

from gptworks.checkpoint.convert import convert
from gptworks.cli.main import main
from gptworks.doctor.finding import Finding
from gptworks.interop import registry

Paste = Callable[..., foreign.Said]


@pytest.fixture
def paste(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paste:
    """A block goes in as a terminal passes it on: nothing but the device and the size is added."""

    def run(block: str) -> foreign.Said:
        monkeypatch.setattr(sys, "stdin", io.StringIO(block))
        said = foreign.said(["run", "--device", "cpu", "--shrink", "tiny", "--cwd", str(tmp_path), "-"])
        assert said.code == 0, said.err
        return said

    return run


@pytest.mark.slow
def test_s0_01_s0_16_x_01_document_0(shared_data: Path, paste: Paste, tmp_path: Path) -> None:
    train, download, generate = foreign.shell_blocks(shared_data, 0)
    foreign.paddle_corpus(tmp_path)
    for name in ("configs_345m_single_card.yaml", "configs_1.3B_single_card.yaml"):
        shipped = registry.shipped(name)
        assert shipped is not None
        text = shipped.read_text(encoding="utf-8")  # with values of ours: fp16 is slow on a CPU
        text = text.replace("use_pure_fp16: True", "use_pure_fp16: False").replace("max_steps: 500000", "max_steps: 2")
        (tmp_path / name).write_text(text, encoding="utf-8")
    said = paste(train)
    assert "block, line 2: python run_pretrain.py -c ./configs_345m_single_card.yaml" in said.out
    assert "output holds a run already" in said.out and "block, line 5: " in said.out
    assert (tmp_path / "output/step_2/model.pdparams").is_file()
    assert (tmp_path / "output.2/step_2/model.pdparams").is_file()
    said = paste(download)
    assert said.out.count("run it in your shell first") == 2
    convert(tmp_path / "output/step_2", tmp_path / "ckpt/GPT_345M_300B_DP_20220826/mp_00_sharding_00_pp_00", "fleetx")
    said = paste(generate.partition("# 生成的文本")[0])  # behind it stands what the command printed
    assert "\nPrompt: Hi, GPT2. Tell me who Jack Ma is.\nGeneration: Hi, GPT2. Tell" in said.out


def test_s1_01_s1_04_s1_05_x_01_document_1(
    shared_data: Path,
    paste: Paste,
    corpus_file: Path,
    small_tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install, image, prepare, script, train, *_ = foreign.shell_blocks(shared_data, 1)
    foreign.fill(tmp_path, corpus_file, small_tokenizer)
    said = paste(install)
    assert "run it in your shell first" in said.out and said.out.count("not needed: gptworks is installed") == 2
    assert "not needed: gptworks runs without a container" in paste(image).out
    paste(prepare)
    assert (tmp_path / "gpt_sample_dataset_text_document.idx").is_file()
    monkeypatch.setenv("ONEFLOW_GPT_TRAIN_ITERS", "1")
    monkeypatch.setenv("ONEFLOW_GPT_SAVE_PATH", "by_script")
    assert "example/pretrain_345M.sh is not here: the settings of the original" in paste(script).out
    assert (tmp_path / "by_script/iter1_snapshot").is_dir() and not (tmp_path / "checkpoint").exists()
    paste(train.replace("500000", "2"))
    assert (tmp_path / "checkpoint/iter2_snapshot/snapshot_done").is_file()


def test_s1_12_s1_13_the_scripts_of_several_devices(
    shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *_, one_machine, four_machines = foreign.shell_blocks(shared_data, 1)
    translated = foreign.translate(capsys, one_machine, "--cwd", str(tmp_path))
    assert [translated["config"]["parallel"][axis] for axis in ("dp", "tp")] == [2, 4]
    translated = foreign.translate(capsys, four_machines, "--cwd", str(tmp_path))
    (told,) = (remark for remark in translated["remarks"] if "ONEFLOW_GPT_NODE_IPS" in remark)
    assert told.startswith("10.11.0.2,10.11.0.3,10.11.0.4,10.11.0.5 are the original's machines")
    words = ["run", "--device", "cpu", "--cwd", str(tmp_path), "--"]
    assert "`gptworks ... --node-rank N`" in foreign.error_of(capsys, [*words, four_machines])
    mine = "export ONEFLOW_GPT_NODE_IPS=127.0.0.1,10.11.0.3,10.11.0.4,10.11.0.5\n"
    told = foreign.error_of(capsys, [*words, mine + four_machines])
    assert told.startswith("error: --use-rdma (--rdma): the device is cpu")


def test_s2_01_an_interpreter_and_what_is_typed_into_it(
    shared_data: Path, paste: Paste, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptworks.doctor.machine.findings", lambda: [Finding("torch", "ok", "2.9")])
    said = paste(foreign.shell_blocks(shared_data, 2)[1])
    assert "$ gptworks doctor" in said.out and said.out.splitlines()[-1] == "ready"


def test_s1_08_the_command_of_the_container(
    shared_data: Path, paste: Paste, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A docker on PATH writes down how it is started. Run inside it is in tests/conformance/test_run_oneflow.py."""
    (block,) = (each for each in foreign.shell_blocks(shared_data, 1) if "launch_container.py" in each)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/docker").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/words\n')
    (tmp_path / "bin/docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    paste(f"# 容器\n$ {block}")
    words = (tmp_path / "words").read_text().splitlines()
    assert "oneflow-manylinux2014-cuda11.2:0.1" in words and f"{tmp_path}:{tmp_path}" in words
    assert "oneflow_gpt.training" in words and words[-1] == "--fp16"


@pytest.mark.slow
def test_s2_02_s2_03_s2_04_s2_07_s2_08_s2_09_s2_10_s2_11_x_01_document_2(
    shared_data: Path,
    paste: Paste,
    corpus_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = foreign.shell_blocks(shared_data, 2)
    (prepare,) = (block for block in every if "create_pretraining_data.py" in block)
    train, _, wikitext, lambada, by_name, export, infer = every[-7:]
    (tmp_path / "corpus").mkdir()
    lines = [json.dumps({"text": text}) + "\n" for text in corpus_file.read_text(encoding="utf-8").split("\n\n")]
    (tmp_path / "corpus/part.jsonl.zst").write_bytes(zstandard.compress("".join(lines).encode()))
    paste(prepare.replace("/path/to/openwebtext/", "corpus").replace("40", "1"))
    (move,) = (block for block in every if "mv gpt_en_dataset_300m_ids.npy" in block)
    for end in ("ids.npy", "idx.npz"):
        (tmp_path / f"gpt_openwebtext_{end}").rename(tmp_path / f"gpt_en_dataset_300m_{end}")
    assert paste(move).out.count("run it in your shell first") == 2
    for end in ("ids.npy", "idx.npz"):
        shutil.move(tmp_path / f"gpt_en_dataset_300m_{end}", tmp_path / "data")
    said = paste(train.replace("500000", "2"))
    assert "cd PaddleNLP/model_zoo/gpt: no such folder" in said.out
    assert (tmp_path / "output/model_2/model_state.pdparams").is_file()
    (tmp_path / "wikitext-103").mkdir()
    (tmp_path / "wikitext-103/wiki.valid.tokens").write_text(" = Lamp = \n " + "the lamp was lit " * 60 + "\n")
    (tmp_path / "lambada_test.jsonl").write_text(json.dumps({"text": "the keeper lit the lamp"}) + "\n")
    assert "adjusted ppl: " in paste(wikitext).out
    assert "total examples: 1.0000E+00" in paste(lambada).out
    convert(tmp_path / "output/model_2", tmp_path / "home/models/gpt2-en", "hf")
    monkeypatch.setenv("GPTWORKS_HOME", own_home(tmp_path / "home"))
    assert "total examples: 1.0000E+00" in paste(by_name).out
    paste(export)
    assert {"merges.txt", "vocab.json"} <= {path.name for path in (tmp_path / "infer_model").iterdir()}
    assert paste(infer).out


@pytest.mark.slow
def test_s3_01_s3_06_s2_05_document_3(
    shared_data: Path, paste: Paste, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of its eight devices; all of them are in the slow test of its command."""
    start, command = foreign.shell_blocks(shared_data, 3)
    monkeypatch.setenv("task_name", "mine")
    for theirs, ours in {'"0,1,2,3,4,5,6,7"': '"0,1"', "--sharding_degree 4": "--sharding_degree 1"}.items():
        assert theirs in command
        command = command.replace(theirs, ours)
    command = command.replace("--global_batch_size 32", "--global_batch_size 8").replace("500000", "1")
    (tmp_path / "static/data").mkdir(parents=True)
    foreign.paddle_npz(tmp_path / "static/data/train.data.json_ids.npz")
    (tmp_path / "static/run.sh").write_text(f"set -x\n{command}", encoding="utf-8")
    said = paste(start)
    assert "not needed: train.data.json_ids.npz is here" in said.out
    out = tmp_path / "static/output/mine"
    assert sorted(path.name for path in (out / "log").iterdir()) == ["workerlog.0", "workerlog.1"]
    assert "global step 1" in (out / "log/workerlog.0").read_text()
    assert (out / "model_1/model_state.pdparams").is_file()


@pytest.mark.slow
def test_s4_02_s4_10_x_01_document_4(shared_data: Path, paste: Paste, corpus_file: Path, tmp_path: Path) -> None:
    train, _, weights = foreign.shell_blocks(shared_data, 4)
    (tmp_path / "wiki.txt").write_text(corpus_file.read_text(encoding="utf-8")[:24000], encoding="utf-8")
    process = "python wikitext2_data_process.py --input_file wiki.txt --output_file mine/w.mindrecord --max_length 1025"
    paste(f"mkdir -p mine\n{process}")
    paste(train.replace("/your_path/wikitext-2-mindrecord", "mine"))
    assert list((tmp_path / "output/rank_0/checkpoint").glob("*.ckpt"))
    small = GPT2Config(n_embd=64, n_head=1, n_layer=12, n_positions=16, vocab_size=60, bos_token_id=0, eos_token_id=0)
    torch.save(GPT2LMHeadModel(small).state_dict(), tmp_path / "pytorch_model.bin")
    paste(weights)
    assert (tmp_path / "mindspore_gpt2.ckpt").is_file()


def test_s4_03_the_words_that_stand_for_a_readers_own(
    shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The block names what goes there. Pasted as it is, it says so; with values of a reader it starts their ranks."""
    block = foreign.shell_blocks(shared_data, 4)[1]
    words = ["run", "--device", "cpu", "--shrink", "tiny", "--cwd", str(tmp_path), "--"]
    assert "RANK_TABLE_FILE" in foreign.error_of(capsys, [*words, block])
    devices = [{"device_id": str(number), "rank_id": str(number)} for number in range(2)]
    servers = [{"server_id": "127.0.0.1", "device": devices}]
    (tmp_path / "two.json").write_text(json.dumps({"server_count": "1", "server_list": servers, "status": "completed"}))
    (tmp_path / "mine.yaml").write_text("base_config: run_gpt2.yaml\nparallel_config: {data_parallel: 2}\n")
    for word, value in {"RANK_TABLE_FILE": "two.json", "CONFIG_PATH": "mine.yaml", " DEVICE_RANGE": " [0,2]"}.items():
        block = re.sub(rf"(?m)^(bash.*){word}", rf"\g<1>{value}", block)
    block = block.replace("RUN_STATUS", "train")
    assert main(["translate", "--json", "--cwd", str(tmp_path), "--", block]) == 0
    translated = json.loads(capsys.readouterr().out)
    assert translated["config"]["parallel"]["dp"] == 2


def test_s4_04_s4_05_the_two_machines_of_the_13b_model(
    shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its table, its layout and its two commands stand in one block, with comments between them."""
    (text,) = (block for block in foreign.text_blocks(shared_data, 4) if "两机16卡" in block)
    table, _, rest = text.partition("\n# 以gpt2-13b")
    layout, _, commands = rest.partition("# 第一台机器")
    (tmp_path / "table.json").write_text(table.partition("\n")[2], encoding="utf-8")
    (tmp_path / "configs/gpt2").mkdir(parents=True)
    shipped = registry.shipped("run_gpt2_13b.yaml")
    assert shipped is not None
    values = yaml.safe_load(shipped.read_text(encoding="utf-8"))
    values["parallel_config"] = yaml.safe_load(layout[layout.index("parallel_config:") :])["parallel_config"]
    (tmp_path / "configs/gpt2/run_gpt2_13b.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    (tmp_path / "scripts").mkdir()
    block = re.sub(r"\{RANK_TABLE_FILE path[^}]*\}", "../table.json", "cd scripts\n# 第一台机器" + commands)
    assert main(["translate", "--json", "--cwd", str(tmp_path), "--", block]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [[each["config"]["parallel"][axis] for axis in ("fsdp", "tp")] for each in found] == [[2, 8]] * 2
    assert [each["arguments"][each["arguments"].index("--rank-range") + 1] for each in found] == ["[0,8]", "[8,16]"]
