"""Blocks as people paste them, with their comments, prompts, folders and the lines that are not ours to run."""

import io
import os
import re
import sys
from pathlib import Path

import foreign_runs as foreign
import pytest
import yaml
from foreign_runs import paddle_corpus
from hypothesis import given, settings
from hypothesis import strategies as st

from gptworks.cli.main import main
from gptworks.cli.redirected import redirected
from gptworks.errors import GPTWorksError
from gptworks.interop import pasted, registry
from gptworks.interop.shell_block import Started

PADDLE = (
    "python run_pretrain.py --model_type gpt --model_name_or_path gpt2-en --input_dir ./data --output_dir out "
    "--micro_batch_size {size} --global_batch_size 8 --max_steps 10 --device cpu"
)
GPT3_BLOCK = f"""cd static # 或者 cd dygraph
# 下载样例数据
mkdir data && cd data
wget https://example.org/models/transformers/gpt/train.data.json_ids.npz
cd ..
# 运行pretrian 脚本
{PADDLE.format(size=8)}
"""


def dry(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["run", "--dry-run", "--cwd", str(folder), *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def configurations(folder: Path, capsys: pytest.CaptureFixture[str], block: str) -> list[dict]:
    assert main(["translate", "--cwd", str(folder), "--", block]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


def test_lines_that_are_not_ours_are_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = dry(tmp_path, capsys, "--", GPT3_BLOCK)
    assert code == 2 and err.startswith("error: --input_dir data (data.path): no such dataset"), (
        "not before it is downloaded"
    )
    assert "block, line 3: mkdir data\n  not needed: folders that are written to are made" in out
    assert "line 4: wget https://example.org" in out and "run it in your shell first" in out
    assert "cd static: no such folder in" in out
    (tmp_path / "static").mkdir()
    paddle_corpus(tmp_path / "static")
    code, out, _ = dry(
        tmp_path, capsys, "--shrink", "tiny", "--", GPT3_BLOCK.replace("train.data.json_ids", "corpus_idx")
    )
    assert code == 0 and "not needed: corpus_idx.npz is here" in out and "cd static" not in out
    assert (tmp_path / "static" / "run_pretrain.gptworks.yaml").is_file()


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        (
            "pip install paddlepaddle-gpu==2.3.2.post112 -f https://example.org/x.html",
            "not needed: gptworks is installed",
        ),
        ("python3 -m pip install oneflow-0.3.5+cu112-cp37-cp37m-manylinux2014_x86_64.whl", "not needed: gptworks is"),
        ("pip install regex tqdm", "run it in your shell first"),
        ("git clone https://example.org/PaddleNLP.git -b develop", "not needed: no clone"),
        ("tar -xzf ckpt/GPT_345M.tgz -C ckpt/", "run it in your shell first"),
        ("docker load -i oneflow.tar.gz", "not needed: gptworks runs without a container"),
        ("echo $HOME/x", "/x"),
        ("mv a.npy ./data", "run it in your shell first"),
        ("python3 --version", "not needed: it only shows something"),
        ("nvcc --version", "not needed: it only shows something"),
        ("python setup.py install", "not needed: gptworks is installed"),
        ("make", "not needed: nothing of the other system is compiled"),
        ("source venv/bin/activate", "not needed: gptworks has the Python"),
        ("echo '{}' > ds_config.json", "run it in your shell first"),
        ("sed -i 's/1024/512/' a.yaml", "run it in your shell first"),
    ],
)
def test_what_other_lines_are_for(line: str, answer: str, tmp_path: Path) -> None:
    (found,) = pasted.lines([line], os.environ, tmp_path)
    assert found.command is None and answer in found.answer


def test_nothing_runs_when_one_line_cannot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = PADDLE.format(size=8)
    for last, told in (
        ("while true; do echo x; done", "block, line 2: a while loop is not read here"),
        ("python my_own_script.py --x 1", "block, line 2: my_own_script.py"),
        ("python run_pretrain.py --out $nowhere", "block, line 2: $nowhere is not set"),
        ("--max_steps 3", "--max_steps stands at the beginning of a line. The line before it lacks its backslash"),
    ):
        assert main(["run", "--cwd", str(tmp_path), "--", f"{first}\n{last}"]) == 2
        said = capsys.readouterr()
        assert told in said.err and said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_several_commands_each_with_what_was_set_before_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = "export MB=4\nfor SIZE in $MB $((MB*2)); do\n" + PADDLE.format(size="${SIZE:-1}") + "\ndone"
    found = configurations(tmp_path, capsys, block)
    assert [each["batch"]["micro_size"] for each in found] == [4, 8]


def test_a_block_comes_through_a_pipe_or_as_a_script_of_any_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    paddle_corpus(tmp_path)
    block = f"$ cd . && export A=1;\r\n$ nohup {PADDLE.format(size=8)} > log 2>&1 &\r\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(block))
    code, piped, _ = dry(tmp_path, capsys, "--shrink", "tiny", "-")
    assert code == 0 and "--micro_batch_size 8" in piped and "nohup" in piped
    (tmp_path / "my-try.sh").write_text(f"#!/bin/bash\nset -e\nMB=$1\n{PADDLE.format(size='$MB')}\n")
    code, out, _ = dry(tmp_path, capsys, "--shrink", "tiny", "--", "bash", "my-try.sh", "2")
    assert code == 0 and "--micro_batch_size 2" in out
    code, out, _ = dry(tmp_path, capsys, "--shrink", "tiny", "--", "my-try.sh 4")
    assert code == 0 and "--micro_batch_size 4" in out


@pytest.mark.parametrize("script", ["pretrain.sh", "run.sh"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_value_changed_in_a_shipped_script_arrives(script: str, data: st.DataObject, tmp_path_factory) -> None:
    """A script of a known name is read, never assumed."""
    original = registry.shipped(script)
    assert original is not None
    text = original.read_text(encoding="utf-8")
    flags = re.findall(r"(--[a-z_-]+) \"?(?:\$\{\w+:-)?([0-9][0-9.,e-]*)", text)
    flag, value = data.draw(st.sampled_from(sorted(set(flags))))
    other = str(int(value) + 1) if value.isdecimal() else f"{value},9" if "," in value else "0.125"
    changed = re.sub(rf'({flag} "?(?:\$\{{\w+:-)?){re.escape(value)}(?![0-9.,])', rf"\g<1>{other}", text)
    assert changed != text
    folder = tmp_path_factory.mktemp("script")
    (folder / script).write_text(changed, encoding="utf-8")
    environment = {name: text for name, text in os.environ.items() if not name.startswith("ONEFLOW")}
    (found,) = (line for line in pasted.lines(["bash", script], environment, folder) if line.command)
    words = found.started.words
    assert words[words.index(flag) + 1] == other
    assert found.command is not None
    try:
        translation = registry.of_command(found.command).translate(found.command, registry.Files(folder))
    except GPTWorksError as refused:  # such as a batch that does not come out
        named = f"{len(other.split(','))} devices" if flag == "--gpus" else flag.strip("-")
        assert named in str(refused)
    else:
        (note,) = (note for note in translation.notes if note.theirs == flag)
        assert note.value == other and (note.ours or note.why)


def test_output_goes_where_the_block_says(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def started(**how: object) -> Started:
        return Started(["x"], {}, tmp_path, "block, line 1", output=str(tmp_path / "log"), **how)

    with redirected(started(on_screen=False, errors_too=True)):
        os.write(1, b"to the file\n")
        os.system("echo from a child; echo its error >&2")
    assert capfd.readouterr() == ("", "")
    assert (tmp_path / "log").read_text().splitlines() == ["to the file", "from a child", "its error"]
    with redirected(started(on_screen=True, appends=True)):
        os.write(1, b"both\n")
    assert capfd.readouterr().out == "both\n"
    assert (tmp_path / "log").read_text().endswith("its error\nboth\n")
    with redirected(started(on_screen=False, errors=str(tmp_path / "made/err"))):
        os.system("echo out; echo wrong >&2")
    assert capfd.readouterr() == ("", "")
    assert (tmp_path / "log").read_text() == "out\n" and (tmp_path / "made/err").read_text() == "wrong\n"


@pytest.mark.slow
def test_a_folder_that_the_block_makes_is_gone_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paddle_corpus(tmp_path)
    command = PADDLE.format(size=8).replace("./data", "../../data").replace("--max_steps 10", "--max_steps 1")
    (tmp_path / "go.sh").write_text(f"{command} > logs/first.log\n")
    block = "mkdir -p try/1 && cd try/1\nbash ../../go.sh"
    assert main(["run", "--cwd", str(tmp_path), "--shrink", "tiny", "--", block]) == 0
    assert "no such folder" not in capsys.readouterr().out
    assert (tmp_path / "try/1/out/checkpoints").is_dir() and not (tmp_path / "out").exists()
    assert (tmp_path / "try/1/logs/first.log").is_file()


def test_what_is_copied_from_an_interpreter_is_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed = ">>> import paddle\n>>> paddle.utils.run_check()"
    for block in (typed, f"$ python3\n{typed}", f"python\n{typed.replace('>>> ', '')}"):
        (line,) = pasted.lines([block], os.environ, tmp_path)
        assert line.command and line.command.arguments == ["import paddle\npaddle.utils.run_check()"]
        (line,) = pasted.lines(["-"], os.environ, tmp_path, text=block)
        assert line.command and line.command.arguments == ["import paddle\npaddle.utils.run_check()"]


def test_a_dash_that_is_none_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = dry(tmp_path, capsys, "--", PADDLE.format(size=8).replace("--max_steps", "\u2013max_steps"))
    assert code == 2 and "'\u2013max_steps' stands where a flag was expected. It begins with U+2013" in err


# What gptworks runs of each block of the five documents, in their order; "" where all lines are answered.
DOCUMENTS = {
    0: ["run_pretrain.py run_pretrain.py", "", "run_generation.py"],
    1: [
        "", "", "preprocess_data.py", "pretrain_345M.sh", "oneflow_gpt.training", "launch_container.py",
        "pretrain_1n8d_2x4x1_16_1536x16.sh", "distribute_pretrain_4n8d_2x4x4_512_2304x24.sh",
    ],
    2: [
        "", "-c", "", "", "", "", "tar", "create_pretraining_data.py", "", "", "run_pretrain.py",
        "run_pretrain_static.py", "run_eval.py", "run_eval.py", "run_eval.py", "export_model.py", "inference.py",
    ],
    3: ["run.sh", "run_pretrain_static.py"],
    4: ["run_mindformer.py", "run_distribute.sh", "convert_weight.py"],
}  # fmt: skip


@pytest.mark.parametrize("number", DOCUMENTS)
def test_every_block_of_a_document_as_it_stands(
    number: int, shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("task_name", "gpt-mp2-sharding4")
    found = []
    for block in foreign.shell_blocks(shared_data, number):
        text = block.partition("# 生成的文本")[0]  # behind it stands what the command printed
        lines = list(pasted.lines([text], os.environ, tmp_path))
        pasted.check(lines)
        found.append(" ".join(Path(line.command.program).name for line in lines if line.command))
    assert found == DOCUMENTS[number]


def test_a_block_in_which_nothing_is_ours_is_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["run", "--cwd", str(tmp_path), "--", "pip install paddlenlp\ngit clone https://example.org/x.git"]) == 0
    )
    out = capsys.readouterr().out
    assert "not needed: gptworks is installed" in out and "not needed: no clone" in out
    assert main(["run", "--cwd", str(tmp_path), "--", f"{PADDLE.format(size=8)}\nPrompt: Hi, GPT2."]) == 2
    assert "If it is not a command, but what one has printed, leave it out." in capsys.readouterr().err
