"""What somebody met who brought the documents' commands here for the first time."""

import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from gptworks.cli.main import main
from gptworks.interop import command_line, registry
from gptworks.interop.translation import Translation

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
    """In ./data a corpus of small ids, as Paddle's tools write it."""
    draw = np.random.default_rng(0)
    lens = draw.integers(30, 200, size=60).astype(np.int32)
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data/corpus_ids.npy", draw.integers(0, 500, size=int(lens.sum())).astype(np.uint16))
    np.savez(tmp_path / "data/corpus_idx.npz", lens=lens, docs=np.arange(len(lens) + 1, dtype=np.int64))
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
    advice = said.split("To go on with the earlier one: ")[1].splitlines()[0]
    monkeypatch.chdir(folder)
    assert main(shlex.split(advice)[1:]) == 0
    assert (folder / "output/checkpoints/step-00000002").is_dir()


def test_a_translated_file_that_was_edited_stays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, missing = folder / "run_pretrain.gptworks.yaml", f"{PADDLE} --output_dir output --input_dir ./nowhere"
    assert run(folder, missing, *TINY, "--dry-run") == 0
    assert not file.exists(), "a dry run writes nothing"
    assert run(folder, missing, *TINY) == 2
    first = file.read_text(encoding="utf-8")
    assert run(folder, f"{missing} --seed 7", *TINY) == 2
    assert file.read_text(encoding="utf-8") != first and len(list(folder.glob("*.yaml*"))) == 1, "not edited"
    mine = file.read_text(encoding="utf-8").replace("seed: 7", "seed: 8")
    file.write_text(mine, encoding="utf-8")
    capsys.readouterr()
    assert run(folder, missing, *TINY) == 2
    assert file.read_text(encoding="utf-8") == first
    assert (folder / "run_pretrain.gptworks.yaml.edited-1").read_text(encoding="utf-8") == mine
    assert "run_pretrain.gptworks.yaml was changed by hand; it is run_pretrain.gptworks.yaml.edited-1 now" in (
        capsys.readouterr().out
    )


def test_s0_11_the_documents_command_has_the_documents_numbers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
