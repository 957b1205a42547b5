"""What somebody met who brought the documents' commands here for the first time."""

import shlex
import shutil
import socket
from pathlib import Path

import pytest
import torch
from foreign_runs import paddle_corpus

from gptworks.checkpoint.systems import huggingface
from gptworks.cli.main import main
from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.data.store import locate_stores
from gptworks.errors import DataError, UsageError
from gptworks.interop import command_line, registry, shrink
from gptworks.interop.translation import Translation
from gptworks.launch import nodes, rank_table
from gptworks.launch.membership import Membership
from gptworks.launch.world import World
from gptworks.parallel.build import FreshWeights, build_gpt

TINY = ("--device", "cpu", "--shrink", "tiny")
PADDLE = (
    "python run_pretrain.py --model_type gpt --model_name_or_path gpt2-en --input_dir ./data --micro_batch_size 1 "
    "--max_steps 2 --save_steps 2 --max_lr 1e-3 --min_lr 1e-4 --device cpu "
)
FLEETX = "python run_pretrain.py -c configs_345m_single_card.yaml "
FEW = "-o Model.vocab_size=512 -o Engine.mix_precision.use_pure_fp16=False "
FEW += " ".join(f"-o Data.batch_size.{size}_batch_size=2" for size in ("global", "local", "micro"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    paddle_corpus(tmp_path)
    return tmp_path


def translated(command: str, folder: Path = Path()) -> Translation:
    taken = command_line.split([command], {}, folder)
    found: Translation = registry.of_command(taken).translate(taken, registry.Files(folder))
    return found


def run(folder: Path, command: str, *options: str) -> int:
    return main(["run", *options, "--cwd", str(folder), "--", *shlex.split(command)])


def begun(folder: Path, name: str) -> None:
    """As if a run of ours were there."""
    (folder / name).mkdir(parents=True)
    (folder / name / "environment.json").write_text("{}", encoding="utf-8")


@pytest.mark.parametrize("out", ["output/", "./output/", "output"])
def test_a_second_run_lies_beside_the_first_however_its_folder_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    begun(folder, "output")
    assert run(folder, f"{PADDLE} --output_dir {out}", *TINY, "--dry-run") == 0
    said = capsys.readouterr().out
    assert "--out output.2\n" in said
    assert "gptworks train -c output/config.yaml --out output --resume auto" in said


@pytest.mark.slow
def test_the_earlier_run_is_gone_on_with_as_the_note_says(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = f"{FLEETX} {FEW} -o Engine.max_steps=2 -o Engine.save_load.save_steps=1"
    assert run(folder, command, *TINY) == 0
    shutil.rmtree(folder / "output/checkpoints/step-00000002")  # as if it had been killed before
    for name in ("step_1", "step_2"):
        shutil.rmtree(folder / "output" / name)
    (folder / "output/foreign_names.json").unlink()
    capsys.readouterr()
    assert run(folder, command, *TINY) == 0
    said = capsys.readouterr().out
    assert (folder / "output.2/step_2/model.pdparams").is_file()
    assert (folder / "output/step_1/model.pdparams").is_file(), "what the killed run could not write"
    other = command.replace("vocab_size=512", "vocab_size=640")
    shutil.rmtree(folder / "output/step_1")
    assert run(folder, f"{other} -o Data.dataset.input_dir=./nowhere", *TINY) == 2
    assert not (folder / "output/step_1").exists(), "another model: not the run of this command"
    advice = said.split("To go on with the earlier one: ")[1].splitlines()[0]
    monkeypatch.chdir(folder)
    assert main(shlex.split(advice)[1:]) == 0
    assert (folder / "output/checkpoints/step-00000002").is_dir()


def test_a_translated_file_that_was_edited_stays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, missing = folder / "run_pretrain.gptworks.yaml", f"{PADDLE} --output_dir output --input_dir ./nowhere"
    assert run(folder, missing, *TINY) == 2
    first = file.read_text(encoding="utf-8")
    assert run(folder, f"{missing} --seed 7", *TINY) == 2
    assert file.read_text(encoding="utf-8") != first and len(list(folder.glob("*.yaml*"))) == 1, "not edited"
    mine = file.read_text(encoding="utf-8").replace("seed: 7", "seed: 8")
    file.write_text(mine, encoding="utf-8")
    capsys.readouterr()
    assert run(folder, missing, *TINY, "--dry-run") == 2
    assert file.read_text(encoding="utf-8") == mine, "a dry run changes nothing of it"
    assert "run_pretrain.gptworks.yaml was changed by hand, and is left as it is" in capsys.readouterr().out
    assert run(folder, missing, *TINY) == 2
    assert file.read_text(encoding="utf-8") == first
    assert (folder / "run_pretrain.gptworks.yaml.edited-1").read_text(encoding="utf-8") == mine
    assert "run_pretrain.gptworks.yaml was changed by hand; it is run_pretrain.gptworks.yaml.edited-1 now" in (
        capsys.readouterr().out
    )


def test_the_documents_command_has_the_documents_numbers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = translated(FLEETX, folder).config
    assert (config["optim.lr"], config["optim.min_lr"], config["train.recompute"]) == (1e-5, 5e-5, "full")
    assert run(folder, FLEETX, *TINY, "--dry-run") == 0
    said = capsys.readouterr().out
    assert "max_lr 1e-05 is below min_lr 5e-05" in said
    assert "is not here: used is the file of the document, with the numbers that it prints" in said
    assert run(folder, FLEETX.replace("345m", "1.3B"), *TINY, "--dry-run") == 0
    assert "used is the file of that name in FleetX's repository" in capsys.readouterr().out


def test_no_process_starts_where_the_device_is_missing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "sh run.sh", "--device", "cuda") == 2
    told = capsys.readouterr()
    assert "cuda is not available here" in told.err
    assert "8 processes" not in told.out.split("\n$ ")[1]
    assert not (folder / "output").exists()


def test_a_mistyped_name_is_answered_with_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/gpt_text_document.bin").write_bytes(b"\0" * 8)
    for typed, meant in (("corpus/gpt", "corpus/gpt_text_document"), ("corpos", "corpus"), ("corpos/x", "corpus")):
        with pytest.raises(DataError, match=f"Did you mean {tmp_path / meant}\\?"):
            locate_stores(str(tmp_path / typed))
    with pytest.raises(DataError, match=r"no such dataset\. Needed"):
        locate_stores(str(tmp_path / "another/thing"))
    for name, told in (
        ("configs_345m_single_cart.yaml", "Did you mean configs_345m_single_card.yaml, which comes with gptworks?"),
        ("/nowhere/else.yaml", "/nowhere/else.yaml: no such file. "),
    ):
        assert main(["run", "--cwd", str(tmp_path), "--", *FLEETX.split()[:3], name]) == 2
        assert told in capsys.readouterr().err
    generate = "python run_generation.py -c configs_345m_single_card.yaml -o Engine.save_load.ckpt_dir=./nowhere"
    assert run(tmp_path, generate, "--device", "cpu") == 2
    told_both = capsys.readouterr()
    assert "the folder of model.pdparams" in told_both.err
    assert "max_lr" not in told_both.out.split("\nnote:", 1)[1], "rates are for training"


def test_translate_takes_options_behind_the_file_and_names_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = "data:\n  path: [d]\ntrain:\n  steps: 4\n"
    (tmp_path / "ours.yaml").write_text(config, encoding="utf-8")
    assert main(["translate", str(tmp_path / "ours.yaml"), "--to", "fleetx"]) == 0
    assert "in the words of FleetX" in capsys.readouterr().out
    assert main(["translate", "--", "python", "unknown.py"]) == 2
    assert capsys.readouterr().err.startswith("error: translate: unknown.py")
    assert main(["translate", "--to", "fleetx", str(tmp_path / "nothere.yaml")]) == 2
    assert "-c" not in capsys.readouterr().err
    rising = f"{config}optim: {{lr: 1.0e-5, min_lr: 5.0e-5, allow_rising_lr: true}}\n"
    (tmp_path / "ours.yaml").write_text(rising, encoding="utf-8")
    assert main(["translate", "--to", "megatron", str(tmp_path / "ours.yaml")]) == 2
    assert "they would be refused there" in capsys.readouterr().err


def test_what_another_shell_or_system_would_have_read_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--", "python", "train.py", "--dataset", "shakespeare_char"]) == 2
    assert "nanoGPT takes --key=value, with the equals sign: --dataset=shakespeare_char" in capsys.readouterr().err
    emptied = f"task_name=gpt3 {PADDLE} --output_dir output/"
    paddle_corpus(tmp_path)
    assert run(tmp_path, emptied, *TINY, "--dry-run") == 0
    assert "put nothing in the place of $task_name" in capsys.readouterr().out
    whole = f"task_name=gpt3 {PADDLE} --output_dir out/"
    assert main(["run", *TINY, "--cwd", str(tmp_path), "--dry-run", "--", whole]) == 0
    assert "in the place of" not in capsys.readouterr().out, "one text: no shell has touched it"
    assert main(["run", "--cwd", str(tmp_path), "--", f"{PADDLE} --output_dir output/$NOWHERE_SET"]) == 2
    assert "gptworks run -- 'NOWHERE_SET=... COMMAND'" in capsys.readouterr().err


def test_the_documents_yaml_of_mindformers_is_strict_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = "python run_mindformer.py --config configs/gpt2/run_gpt2.yaml --run_mode train --dataset_dir ./x"
    assert run(tmp_path, train, "--strict", "--device", "cpu", "--dry-run") == 2
    assert capsys.readouterr().err.startswith("error: --dataset_dir x (data.path): no such dataset"), (
        "strict enough: only the data are missing"
    )
    for changed in ("model.model_config.layernorm_dtype=float16", "layer_scale=True", "train_dataset.eod_reset=True"):
        capsys.readouterr()
        assert run(tmp_path, f"{train} --options {changed}", "--strict", "--device", "cpu", "--dry-run") == 2
        assert f"--strict: 1 problem\n  {changed.partition('=')[0]}: ignored (" in capsys.readouterr().err


def test_the_file_for_32_devices_on_16_is_mended_by_two_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for machine in ("10.0.0.1", "10.0.0.2"):
        table = ["launch", "--make-rank-table", "[0,8]", "--server-ip", machine]
        assert main([*table, "--out", str(tmp_path / f"{machine}.json")]) == 0
    merged = [str(tmp_path / f"10.0.0.{n}.json") for n in (1, 2)]
    assert main(["launch", "--merge-rank-tables", *merged, "--out", str(tmp_path / "both.json")]) == 0
    distribute = "bash run_distribute.sh both.json {config} [8,16] train"
    document = "../configs/gpt2/run_gpt2_13b.yaml"
    assert run(tmp_path, distribute.format(config=document), "--device", "cpu", "--dry-run") == 2
    told = capsys.readouterr().err
    lines = f"base_config: {document} and parallel_config: {{data_parallel: 2}}"
    assert lines in told
    (tmp_path / "mine.yaml").write_text(lines.replace(" and ", "\n") + "\n", encoding="utf-8")
    mine = distribute.format(config="mine.yaml")
    assert run(tmp_path, mine, "--device", "cpu", "--shrink", "tiny", "--dry-run") == 2
    said, refused = capsys.readouterr()
    assert "--rank-range: [8,16] of both.json is 10.0.0.2, which is not this machine" in refused
    assert "base_config: ../configs/gpt2/run_gpt2_13b.yaml is not here; the one that comes with gptworks" in said
    assert "parallel.fsdp=2" in said
    missing = "bash run_distribute.sh RANK_TABLE_FILE mine.yaml [0,8] train"
    assert run(tmp_path, missing, "--device", "cpu") == 2
    assert capsys.readouterr().err.startswith("error: RANK_TABLE_FILE: no such file")


def test_a_machine_that_is_not_in_the_rank_table_does_not_wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = [rank_table.make(range(8), address) for address in ("203.0.113.1", "203.0.113.2")]
    (tmp_path / "t.json").write_text(rank_table.dump(rank_table.merge(tables)), encoding="utf-8")
    for ranks, machine in (("[0,8]", "203.0.113.1"), ("[8,16]", "203.0.113.2")):
        words = ["train", "--preset", "124M", "--rank-table", str(tmp_path / "t.json"), "--rank-range", ranks]
        assert main([*words, "data.path=x", "train.steps=1", "--device", "cpu"]) == 2
        told = capsys.readouterr().err
        assert f"{machine}, which is not this machine. None of its addresses" in told and "--node-rank" in told
    mixed = rank_table.merge([tables[0], rank_table.make(range(8), "127.0.0.1:29500")])
    (tmp_path / "t.json").write_text(rank_table.dump(mixed), encoding="utf-8")
    with pytest.raises(UsageError, match=r"This one is 127\.0\.0\.1:29500, with \[8,16\]"):
        nodes.require_local_ranks(tmp_path / "t.json", "[0,8]")
    nodes.require_local_ranks(tmp_path / "t.json", "[8,16]")


def test_a_node_says_for_whom_it_waits() -> None:
    said: list[str] = []
    with socket.socket() as nobody:  # bound and not listening: no other program gets this port in the meantime
        nobody.bind(("127.0.0.1", 0))
        lost = nodes.Nodes(2, 2, 1, "127.0.0.1", nobody.getsockname()[1])
        with pytest.raises(UsageError, match="node 1 cannot reach node 0 there"):
            Membership(lost, said.append).enter(lambda: None, 1.2)
    assert said and said[0].startswith(f"waiting for node 0 at 127.0.0.1:{lost.port} (")


def test_the_note_on_shrinking_says_each_change_once() -> None:
    config = {"init.checkpoint": "a.ckpt", "model.num_layers": 12, "train.epochs": 1.0, "model.num_heads": 12}
    told = shrink.describe(config, shrink.tiny(config))
    assert told.count("model.num_layers") == 1 and "model.num_layers: 12 -> that of the checkpoint" in told
    assert "train.epochs: 1.0 -> unset" in told


def test_convert_weight_looks_at_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool = "python convert_weight.py --layers {} --torch_path hf/model.safetensors --mindspore_path m.ckpt"
    shape = ModelConfig(num_layers=2, hidden_size=8, num_heads=2, vocab_size=32, max_positions=8)
    (tmp_path / "hf").mkdir()
    gpt = build_gpt(shape, World(torch.device("cpu")), torch.float32, FreshWeights(InitConfig(), 2, seed=5))
    huggingface.save(tmp_path / "hf", shape, dict(gpt.named_parameters()), eod_id=31)
    assert run(tmp_path, tool.format(12), "--dry-run") == 2
    assert "--layers: got 12, but hf/model.safetensors has 2." in capsys.readouterr().err
    assert run(tmp_path, tool.format(2), "--dry-run") == 0
    assert "num_heads" not in capsys.readouterr().out
