"""`run --dry-run` checks what the run would check, and writes nothing but the translated YAML."""

from pathlib import Path

import pytest
from foreign_runs import paddle_corpus

from gptworks.cli.main import main

TRAIN = (
    "python run_pretrain.py --model_type gpt --model_name_or_path gpt2-en --input_dir {data} --output_dir out "
    "--micro_batch_size {size} --global_batch_size 8 --max_steps 10 --device cpu"
)
YAML = "run_pretrain.gptworks.yaml"
PREPARE = (
    "python tools/preprocess_data.py --input corpus.jsonl --output-prefix made --vocab-file vocab.json "
    "--merge-file merges.txt --append-eod"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    paddle_corpus(tmp_path)
    return tmp_path


def dry(folder: Path, command: str, *options: str) -> int:
    return main(["run", "--dry-run", "--device", "cpu", *options, "--cwd", str(folder), "--", command])


@pytest.mark.parametrize(
    ("command", "refused"),
    [
        (TRAIN.format(data="./nowhere", size=8), "error: --input_dir nowhere (data.path): no such dataset."),
        (
            "bash examples/distribute_pretrain_4n8d_2x4x4_512_2304x24.sh",
            "error: --use-rdma (--rdma): the device is cpu",
        ),
        (PREPARE, "error: --input corpus.jsonl (INPUT): no such file."),
        ("python sample.py --out_dir=nowhere --start=Once --device=cpu", "nowhere"),
    ],
    ids=["data", "rdma", "text", "model"],
)
def test_what_the_run_would_refuse(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, refused: str
) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    small = ("--shrink", "tiny") if "run_pretrain.py" in command else ()
    assert dry(folder, command, *small) == 2
    assert refused in capsys.readouterr().err
    made = {path.name for path in folder.rglob("*") if path not in before}
    assert all(name.endswith(".gptworks.yaml") for name in made) and all(
        path.stat().st_mtime_ns == time for path, time in before.items() if path.is_file()
    )


def test_what_it_would_run_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry(folder, TRAIN.format(data="./data", size=8), "--shrink", "tiny") == 0
    assert "samples " in capsys.readouterr().out
    assert {path.name for path in folder.iterdir()} == {"data", YAML}


def test_what_a_command_before_it_writes_may_be_missing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "corpus.jsonl").write_text('{"text": "a b c"}\n', encoding="utf-8")
    train = (
        "python pretrain_gpt.py --num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 "
        "--max-position-embeddings 8 --micro-batch-size 1 --global-batch-size 1 --lr 1e-3 --train-iters 2 "
        "--data-path {data} --vocab-file v --merge-file m --save out"
    )
    assert dry(folder, train.format(data="made_text_document")) == 2
    assert "--data-path made_text_document (data.path): no such dataset" in capsys.readouterr().err
    prepare = "python tools/preprocess_data.py --input corpus.jsonl --output-prefix made --append-eod"
    assert dry(folder, f"{prepare}\n{train.format(data='made_text_document')}") == 0
    assert "made_text_document is not here yet: a command before this one writes it" in capsys.readouterr().out
    assert dry(folder, f"{prepare}\n{train.format(data='other_text_document')}") == 2
