"""The commands of OneFlow's document as they stand in it. Rows of the conformance list: S1-01 to S1-13, S0-06, X-01."""

import itertools
import json
import os
import re
import runpy
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign_runs as foreign
import pytest

from gptworks.checkpoint.systems import registry
from gptworks.cli.main import main
from gptworks.config.load import load
from gptworks.data.store import Store
from gptworks.interop import oneflow
from gptworks.train import setup

PREPARE = """python3 tools/preprocess_data.py \\
       --input my-corpus.json \\
       --output-prefix gpt_sample_dataset \\
       --vocab gpt2-vocab.json \\
       --dataset-impl mmap \\
       --tokenizer-type GPT2BPETokenizer \\
       --merge-file gpt2-merges.txt \\
       --append-eod
"""
TRAIN = """python3 -m oneflow_gpt.training \\
    --num-layers 24 \\
    --hidden-size 1024 \\
    --num-attention-heads 16 \\
    --micro-batch-size 4 \\
    --global-batch-size 8 \\
    --num-gpus-per-node 1 \\
    --train-iters 500000 \\
    --learning-rate 0.00015 \\
    --dataset gpt_sample_dataset_text_document \\
    --seq-length 1024 \\
    --split 949,50,1 \\
    --min-lr 1.0e-5 \\
    --lr-decay-style cosine \\
    --lr-decay-iters 320000 \\
    --lr-warmup-fraction 0.01 \\
    --weight-decay 1e-2 \\
    --optimizer adamw \\
    --clip-grad 1.0 \\
    --vocab-size 50257 \\
    --load checkpoint \\
    --save checkpoint \\
    --save-interval 10000 \\
    --log-interval 100 \\
    --checkpoint-activations \\
    --multihead-attention-fusion \\
    --fp16
"""
CONTAINER = """python3 tools/launch_container.py \\
    --src $PWD \\
    --py 3.7 \\
    --image oneflow-manylinux2014-cuda11.2:0.1 \\
    --wheel oneflow-0.3.5+cu112.git.75f11b825-cp37-cp37m-manylinux2014_x86_64.whl \\
    --cmd "python3 -m oneflow_gpt.training \\
                --dataset gpt_sample_dataset_text_document \\
                --seq-length 1024 \\
                --num-layers 24 \\
                --hidden-size 1024 \\
                --num-attention-heads 16 \\
                --micro-batch-size 4 \\
                --global-batch-size 8 \\
                --tensor-model-parallel-size 1 \\
                --pipeline-model-parallel-size 1 \\
                --num-gpus-per-node 1 \\
                --train-iters 500000 \\
                --learning-rate 0.00015 \\
                --min-lr 1.0e-5 \\
                --lr-decay-style cosine \\
                --lr-decay-iters 320000 \\
                --lr-warmup-fraction 0.01 \\
                --initial-loss-scale 4294967296 \\
                --optimizer adamw \\
                --weight-decay 1e-2 \\
                --clip-grad 1.0 \\
                --vocab-size 50257 \\
                --split 949,50,1 \\
                --load checkpoint \\
                --save checkpoint \\
                --save-interval 10000 \\
                --log-interval 100 \\
                --checkpoint-activations \\
                --multihead-attention-fusion \\
                --fp16"
"""
PROSE = " --num-accumulation-steps 2 --num-nodes 2 --node-ips 10.0.0.1,10.0.0.2 --use-rdma"
DATASET = "gpt_sample_dataset_text_document"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, corpus_file: Path, small_tokenizer) -> Path:
    """With what the first command of the document leaves. Read it, do not train in it."""
    made = tmp_path_factory.mktemp("document")
    foreign.fill(made, corpus_file, small_tokenizer)
    assert foreign.run(made, PREPARE) == 0
    return made


@pytest.fixture
def beside(folder: Path, tmp_path: Path) -> Path:
    """A folder of its own with the same files."""
    for file in folder.iterdir():
        if file.is_file():
            (tmp_path / file.name).symlink_to(file)
    return tmp_path


def test_s1_01_preprocess_data_leaves_the_documented_pair(folder: Path, small_tokenizer) -> None:
    store = Store(folder / DATASET)
    assert (folder / f"{DATASET}.bin").is_file() and (folder / f"{DATASET}.idx").is_file()
    first = json.loads((folder / "my-corpus.json").read_text(encoding="utf-8").splitlines()[0])["text"]
    expected = [*small_tokenizer.encode(first), small_tokenizer.eod_id]
    assert store.tokens[: len(expected)].tolist() == expected


def test_s1_01_every_flag_of_preprocess_data_is_noted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = foreign.translate(capsys, PREPARE, "--cwd", str(folder))
    assert foreign.noted(found) == foreign.flags_in(PREPARE)
    assert {note["how"] for note in found["notes"]} == {"mapped"}


def test_s1_01_json_key_and_the_published_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my-corpus.json").write_text('{"body": "The quick brown fox"}\n', encoding="utf-8")
    command = PREPARE.replace("--append-eod", "--append-eod --json-key body")
    assert foreign.run(tmp_path, command) == 0
    assert "ship with gptworks" in capsys.readouterr().out  # gpt2-vocab.json is not in this folder
    assert Store(tmp_path / "gpt_sample_dataset_body_document").tokens[:].tolist() == [464, 2068, 7586, 21831, 50256]


@pytest.mark.parametrize(("kind", "magic"), [("cached", b"TNTIDX"), ("lazy", b"TNTIDX"), ("mmap", b"MMIDIDX")])
def test_s1_02_dataset_impl_in_their_words(kind: str, magic: bytes, beside: Path) -> None:
    command = PREPARE.replace("--dataset-impl mmap", f"--dataset-impl {kind}").replace("gpt_sample", "other")
    assert foreign.run(beside, command) == 0
    assert (beside / "other_dataset_text_document.idx").read_bytes().startswith(magic)


def test_s1_05_s1_06_s1_07_training_runs_as_documented(beside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert foreign.run(beside, TRAIN) == 0
    told = capsys.readouterr().out
    assert "--checkpoint-activations" in told and "gptworks train -c oneflow_gpt.gptworks.yaml" in told
    found = foreign.losses(beside / "checkpoint")
    assert [step for step, _ in found] == list(range(1, 11))
    assert not (beside / "checkpoint" / "nonfinite.jsonl").exists()  # no step was skipped for a loss scale too large
    assert foreign.train_again(beside, "oneflow_gpt.gptworks.yaml", "again") == found
    snapshot = beside / "checkpoint" / "iter10_snapshot"
    assert (snapshot / "model-wte" / "out").is_file() and (snapshot / "snapshot_done").is_file()
    opened = registry.open_any(snapshot, {"num_heads": 4})
    assert opened.system == "oneflow" and opened.model.num_layers == 2
    # --load of what --save left: it goes on, and there is nothing left to do.
    assert foreign.run(beside, TRAIN) == 0
    assert len(foreign.losses(beside / "checkpoint")) == 10


# In fp32 and without dropout, so that layouts can be compared.
SMALL = (
    "python3 -m oneflow_gpt.training --num-layers 2 --hidden-size 32 --num-attention-heads 4 --micro-batch-size 2 "
    f"--train-iters 3 --dataset {DATASET} --seq-length 32 --vocab-size 512 --lr-decay-style cosine "
    "--log-interval 1 --save-interval 3 --learning-rate 0.01 --hidden-dropout 0 --attention-dropout 0"
)


@pytest.mark.slow
def test_s1_06_load_takes_the_weights_of_a_snapshot_that_oneflow_wrote(
    beside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu = ["run", "--device", "cpu", "--cwd", str(beside), "--"]
    assert main([*cpu, f"{SMALL} --save first"]) == 0
    (beside / "theirs").mkdir()
    (beside / "first" / "iter3_snapshot").rename(beside / "theirs" / "iter3_snapshot")
    assert main([*cpu, f"{SMALL} --load theirs --save theirs"]) == 0
    assert "theirs was written by oneflow: its weights are the start of theirs/gptworks" in capsys.readouterr().out
    before, after = foreign.losses(beside / "first"), foreign.losses(beside / "theirs" / "gptworks")
    assert len(after) == 3 and after[0][1] < before[0][1] - 0.05  # the same first batch, with what was learned
    assert (beside / "theirs" / "iter3_snapshot").is_dir()


def test_s1_05_every_flag_is_noted_those_of_the_prose_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert foreign.noted(foreign.translate(capsys, TRAIN)) == foreign.flags_in(TRAIN)
    several = foreign.with_value(TRAIN.strip() + PROSE, "--global-batch-size", "16")
    found = foreign.translate(capsys, several)
    assert foreign.noted(found) == foreign.flags_in(several)
    assert found["config"]["parallel"]["dp"] == 2
    assert found["arguments"][-5:] == ["--node-ips", "10.0.0.1,10.0.0.2", "--nproc", "1", "--rdma"]


def test_s1_05_foreign_defaults_are_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        "python3 -m oneflow_gpt.training --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
        "--micro-batch-size 2 --train-iters 5 --dataset X --lr-decay-style cosine"
    )
    config = foreign.translate(capsys, command)["config"]
    assert config["train"]["seed"] == 12345 and config["train"]["log_every"] == 100
    assert config["optim"]["lr"] == 1e-3 and config["optim"]["beta2"] == 0.999 and config["optim"]["warmup_from"] == 0
    assert config["data"]["split"] == "969,30,1" and config["data"]["seq_len"] == 1024
    assert config["model"]["vocab_size"] == 50304 and config["model"]["gelu"] == "erf"
    assert config["model"]["dropout_embed"] == config["model"]["dropout_attention"] == 0.1
    assert config["precision"]["compute"] == "fp32" and config["batch"]["global_size"] == 2
    assert config["run"]["out"] == "./output"


OTHER_VALUES = {
    "--num-layers": "12", "--hidden-size": "512", "--num-attention-heads": "8", "--micro-batch-size": "8",
    "--global-batch-size": "16", "--num-gpus-per-node": "2", "--train-iters": "1000", "--learning-rate": "0.1",
    "--dataset": "other", "--seq-length": "512", "--split": "1,1,1", "--min-lr": "2e-5", "--lr-decay-style": "linear",
    "--lr-decay-iters": "1000", "--lr-warmup-fraction": "0.5", "--weight-decay": "0", "--clip-grad": "2",
    "--vocab-size": "60000", "--load": "elsewhere", "--save": "elsewhere", "--save-interval": "7",
    "--log-interval": "3",
    "--tensor-model-parallel-size": "2", "--pipeline-model-parallel-size": "2", "--seed": "7", "--hidden-dropout": "0",
    "--attention-dropout": "0", "--adam-beta1": "0.5", "--adam-beta2": "0.5", "--adam-eps": "1e-3",
    "--make-vocab-size-divisible-by": "1000", "--init-method-std": "0.5", "--initial-loss-scale": "8",
    "--loss-scale": "16", "--loss-scale-window": "9", "--lr-warmup-iters": "9", "--num-accumulation-steps": "3",
    "--train-samples": "800", "--log": "logs", "--node-ips": "10.0.0.2,10.0.0.1", "--num-nodes": "2",
    "--ctrl-port": "50052",
}  # fmt: skip


def _meaning(translation: dict) -> str:
    return json.dumps([translation["config"], translation["arguments"]])


@pytest.mark.parametrize("flag", sorted(OTHER_VALUES))
def test_s1_05_changing_a_mapped_flag_changes_the_configuration(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = TRAIN.strip()
    instead = {"--train-samples": "--train-iters", "--lr-warmup-iters": "--lr-warmup-fraction", "--log": "--save"}
    if flag in instead:  # the other one would win
        base = base.replace(next(line for line in base.splitlines() if instead[flag] + " " in line) + "\n", "")
    if flag == "--train-samples":
        base += " --train-samples 1600"
    if flag in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size"):
        base = foreign.with_value(base, "--num-gpus-per-node", "2")
    if flag == "--num-accumulation-steps":
        base = base.replace("    --global-batch-size 8 \\\n", "")
    if flag in ("--node-ips", "--num-nodes", "--ctrl-port"):
        base += " --node-ips 10.0.0.1,10.0.0.2"
    if flag in ("--node-ips", "--ctrl-port"):
        base += " --num-nodes 2"
    changed = (
        foreign.with_value(base, flag, OTHER_VALUES[flag])
        if flag in base.split()
        else (f"{base} {flag} {OTHER_VALUES[flag]}")
    )
    before, after = foreign.translate(capsys, base), foreign.translate(capsys, changed)
    note = next(note for note in after["notes"] if note["theirs"] == flag)
    assert note["how"] in ("mapped", "approximated")
    assert _meaning(before) != _meaning(after), flag


@pytest.mark.parametrize("switch", ["--checkpoint-activations", "--fp16"])
def test_s1_07_a_switch_left_out_changes_the_configuration(switch: str, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = foreign.translate(capsys, TRAIN), foreign.translate(capsys, foreign.without(TRAIN, switch))
    assert _meaning(before) != _meaning(after)


def test_every_flag_that_is_mapped_is_in_that_test() -> None:
    """A new flag in the table needs another value above, or a reason why nothing of ours is set."""
    looked_at = set(OTHER_VALUES) | {"--checkpoint-activations", "--fp16", "--use-rdma", "--use-external-dataset"}
    free = {"--optimizer", "--no-bias-gelu-fusion"}
    free |= {key.theirs for key in oneflow.TRAINING if key.ignored_because or key.same_effect}
    assert {key.theirs for key in oneflow.TRAINING} == looked_at | free


def test_s1_07_initial_loss_scale_and_the_fusions(capsys: pytest.CaptureFixture[str]) -> None:
    found = foreign.translate(capsys, TRAIN)
    assert found["config"]["precision"]["scaler"] == {"init": 2.0**32, "window": 1000, "hysteresis": 1}
    assert found["config"]["train"]["recompute"] == "full"
    fusion = next(note for note in found["notes"] if note["theirs"] == "--multihead-attention-fusion")
    assert fusion["how"] == "mapped" and "kernels" in fusion["why"]


@pytest.mark.parametrize(("script", "shape"), [("117M", (12, 768, 12)), ("345M", (24, 1024, 16))])
def test_s1_04_scripts_by_name(script: str, shape: tuple[int, ...], capsys: pytest.CaptureFixture[str]) -> None:
    found = foreign.translate(capsys, f"bash example/pretrain_{script}.sh")
    model, batch = found["config"]["model"], found["config"]["batch"]
    assert (model["num_layers"], model["hidden_size"], model["num_heads"]) == shape
    assert (batch["micro_size"], batch["global_size"]) == (8, 8)
    assert found["config"]["data"]["seq_len"] == 1024 and found["config"]["parallel"]["dp"] == 1
    assert any("is not here" in remark for remark in found["remarks"])
    assert foreign.translate(capsys, f"sh examples/pretrain_{script}.sh")["config"] == found["config"]


def test_s1_04_a_script_on_disk_is_read_and_variables_in_front_are_honoured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").mkdir()
    own = "export ONEFLOW_GPT_NUM_LAYERS=3\n# export ONEFLOW_GPT_DATASET=/x\nexport ONEFLOW_GPT_HIDDEN_SIZE=48\n"
    own += "source $(dirname $0)/pretrain.sh\n"
    (tmp_path / "examples" / "pretrain_345M.sh").write_text(own, encoding="utf-8")
    command = "ONEFLOW_GPT_NUM_GPUS_PER_NODE=1 ONEFLOW_GPT_DATASET=mine bash example/pretrain_345M.sh"
    found = foreign.translate(capsys, command, "--cwd", str(tmp_path))
    assert found["config"]["model"]["num_layers"] == 3 and found["config"]["model"]["hidden_size"] == 48
    assert found["config"]["data"]["path"] == ["mine"]
    assert "example/pretrain.sh is not here: used is the one that comes with gptworks" in found["remarks"][0]


@pytest.mark.slow
def test_s1_04_the_345m_script_runs(beside: Path) -> None:
    assert foreign.run(beside, "ONEFLOW_GPT_TRAIN_ITERS=3 bash example/pretrain_345M.sh") == 0
    found = foreign.losses(beside / "checkpoint")
    assert len(found) == 3
    assert foreign.train_again(beside, "pretrain_345M.gptworks.yaml", "again") == found
    assert (beside / "checkpoint" / "iter3_snapshot" / "model-h1-mlp-c_fc-weight" / "out").is_file()


@pytest.mark.slow
def test_s1_09_s1_13_the_2x4x1_script_runs_on_8_processes(beside: Path, run_cli) -> None:
    command = "ONEFLOW_GPT_TRAIN_ITERS=3 bash examples/pretrain_1n8d_2x4x1_16_1536x16.sh"
    done = run_cli("run", "--device", "cpu", "--shrink", "tiny", "--cwd", beside, "--", command)
    assert len(list((beside / "checkpoint" / "logs").glob("rank-*.log"))) == 8, done.stdout
    several = foreign.losses(beside / "checkpoint")
    assert len(several) == 3 and (beside / "checkpoint" / "iter3_snapshot" / "snapshot_done").is_file()
    written = "pretrain_1n8d_2x4x1_16_1536x16.gptworks.yaml"
    run_cli("train", "-c", beside / written, "--out", beside / "again", cwd=beside)
    assert foreign.losses(beside / "again") == several
    # Without dropout, and in fp32, one process has the same losses but for the order of sums.
    exact = [word for part in ("embed", "hidden", "attention") for word in ("-o", f"model.dropout_{part}=0")]
    exact += ["-o", "precision.compute=fp32"]
    for out, layout in (("eight", []), ("one", ["-o", "parallel.dp=1", "-o", "parallel.tp=1"])):
        run_cli("train", "-c", beside / written, "--out", beside / out, *exact, *layout, cwd=beside)
    alone = [loss for _, loss in foreign.losses(beside / "one")]
    assert [loss for _, loss in foreign.losses(beside / "eight")] == pytest.approx(alone, abs=5e-6)


@pytest.mark.slow
def test_s1_13_the_script_of_four_machines_is_planned(
    beside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Megatron's order is laid out for all steps at once: 500,000 of them would be too many epochs of so small a corpus.
    command = "ONEFLOW_GPT_TRAIN_ITERS=500 bash examples/distribute_pretrain_4n8d_2x4x4_512_2304x24.sh"
    assert main(["run", "--device", "cpu", "--dry-run", "--cwd", str(beside), "--", command]) == 2
    told, refused = capsys.readouterr()
    assert "--use-rdma (--rdma): the device is cpu" in refused
    addresses = "10.11.0.2,10.11.0.3,10.11.0.4,10.11.0.5"
    assert f"--node-ips {addresses} --nproc 8 --rdma" in told
    monkeypatch.chdir(beside)
    file = "distribute_pretrain_4n8d_2x4x4_512_2304x24.gptworks.yaml"
    assert main(["train", "-c", file, "--dry-run", "--world", "32"]) == 0
    assert re.search(r"\b32 (ranks|processes)", capsys.readouterr().out)
    found = foreign.translate(capsys, command)["config"]
    assert {axis: found["parallel"][axis] for axis in ("dp", "tp", "pp")} == {"dp": 2, "tp": 4, "pp": 4}
    assert found["batch"] == {"global_size": 512, "micro_size": 8} and found["model"]["num_heads"] == 24
    assert found["model"]["vocab_size"] == 50688  # a multiple of 128 x 4


def test_s1_12_rdma_is_refused_with_a_reason_on_a_cpu(beside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert foreign.run(beside, TRAIN.strip() + " --use-rdma") == 2
    assert "rdma" in capsys.readouterr().err.lower()


def test_s1_10_a_batch_that_does_not_come_out_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    command = foreign.with_value(TRAIN, "--global-batch-size", "6") + " --num-accumulation-steps 2"
    told = foreign.error_of(capsys, ["translate", "--", command])
    assert "--global-batch-size: 6 is not --micro-batch-size 4 x data-parallel 1 x accumulation 2" in told
    derived = foreign.without(TRAIN, "--global-batch-size").replace(" 8 --num-gpus", " --num-gpus")
    found = foreign.translate(capsys, derived + " --num-accumulation-steps 3")
    assert found["config"]["batch"] == {"global_size": 12, "micro_size": 4}


def test_an_unknown_flag_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    told = foreign.error_of(capsys, ["translate", "--", TRAIN.replace("--micro-batch-size", "--mirco-batch-size")])
    assert "--mirco-batch-size: unknown; did you mean --micro-batch-size?" in told


def test_strict_refuses_what_would_be_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "--strict", "--", TRAIN]) == 0
    told = foreign.error_of(capsys, ["translate", "--strict", "--", TRAIN.strip() + " --metric-print-format table"])
    assert "--metric-print-format: ignored" in told


def test_without_a_device_of_ours_the_gpu_of_the_command_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert foreign.translate(capsys, TRAIN)["config"]["run"]["device"] == "cuda"
    assert foreign.translate(capsys, TRAIN, "--device", "cpu")["config"]["run"]["device"] == "cpu"


def test_a_rate_that_rises_and_a_schedule_they_lack_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    found = foreign.translate(capsys, foreign.with_value(TRAIN, "--min-lr", "1"))
    assert found["config"]["optim"]["allow_rising_lr"] is True
    assert any("--min-lr 1 is above --learning-rate 0.00015" in remark for remark in found["remarks"])
    found = foreign.translate(capsys, foreign.with_value(TRAIN, "--lr-decay-style", "linear"))
    assert any("cosine only" in remark for remark in found["remarks"])
    assert "--optimizer" in foreign.error_of(
        capsys, ["translate", "--", foreign.with_value(TRAIN, "--optimizer", "sgd")]
    )


# Data


@pytest.mark.slow
def test_s1_03_a_dataset_that_megatron_made_is_trained_on(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = "meg-gpt2-openwebtext_text_document"
    for file in (shared_data / "fixtures" / "megatron-mmididx").glob(f"{made}.*"):
        (tmp_path / file.name).symlink_to(file)
    command = foreign.with_value(foreign.without(TRAIN, "--fp16"), "--dataset", made)
    assert foreign.run(tmp_path, foreign.with_value(command, "--train-iters", "3")) == 0
    assert len(foreign.losses(tmp_path / "checkpoint")) == 3
    monkeypatch.chdir(tmp_path)
    (source,) = setup.prepare(load("oneflow_gpt.gptworks.yaml")).train_samples.sources
    assert source.note.endswith(f"OneFlow would lay out 6 of them, 1 epoch of {len(source.document_index)} sequences")


def test_s1_03_with_the_external_dataset_the_order_is_megatrons(capsys: pytest.CaptureFixture[str]) -> None:
    assert foreign.translate(capsys, TRAIN)["config"]["data"]["order"] == "oneflow"
    found = foreign.translate(capsys, TRAIN.strip() + " --use-external-dataset")
    assert found["config"]["data"]["order"] == "megatron"
    (note,) = [note for note in found["notes"] if note["theirs"] == "--use-external-dataset"]
    assert note["how"] == "approximated" and "2021" in note["why"]


# Nearest whole numbers of documents for 94.9, 5 and 0.1 %, halves to the even one, and no correction: by hand.
BORDERS = {10: (0, 9, 9, 9), 50: (0, 47, 49, 49), 69: (0, 65, 68, 68), 1990: (0, 1889, 1989, 1990)}


@pytest.mark.slow
@pytest.mark.parametrize("number", BORDERS)
def test_s0_06_documents_are_split_by_oneflows_own_rule(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_store = runpy.run_path(str(Path(__file__).parents[1] / "fixtures" / "orders" / "check.py"))["write_store"]
    write_store(tmp_path / DATASET, 0, [9] * number)
    found = foreign.translate(capsys, foreign.with_value(TRAIN, "--seq-length", "4"), "--cwd", str(tmp_path))
    expected = [(begin, end) if begin < end else None for begin, end in itertools.pairwise(BORDERS[number])]
    assert foreign.parts_of(found["config"], tmp_path) == expected


# Several machines

ON_A_MACHINE = """
import sys
from gptworks.cli.main import main
from gptworks.launch import nodes
nodes.is_mine = lambda address: address == sys.argv[1]  # on loopback all of them are
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
def test_s1_11_the_same_command_on_two_machines_equals_one_process(beside: Path, held_port: Callable[[], int]) -> None:
    """Two launchers on loopback, each of which finds out which of --node-ips it is; they meet at --ctrl-port."""
    assert (
        main(["run", "--device", "cpu", "--cwd", str(beside), "--", f"{SMALL} --global-batch-size 4 --save one"]) == 0
    )
    addresses = ("127.0.0.1", "127.0.0.2")
    where = f"--num-nodes 2 --node-ips {','.join(addresses)} --ctrl-port {held_port()}"
    words = ["run", "--device", "cpu", "--cwd", str(beside), "--", f"{SMALL} --save two {where}"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    machines = [
        subprocess.Popen([sys.executable, "-c", ON_A_MACHINE, address, *words], **pipes) for address in addresses
    ]
    try:
        told = [machine.communicate()[0] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
            machine.wait()
    assert [machine.returncode for machine in machines] == [0, 0], "\n".join(told)
    assert "node 1 of 2: 1 process, ranks 1 to 1 of 2" in told[1]
    one, two = foreign.losses(beside / "one"), foreign.losses(beside / "two")
    assert len(one) == 3 and [loss for _, loss in two] == pytest.approx([loss for _, loss in one], abs=5e-6)


# The container


@pytest.fixture
def stand_in(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A docker on PATH that writes down its command line and runs the inner command where -w says."""
    place = tmp_path_factory.mktemp("bin")
    docker = f"""#!{sys.executable}
import os, pathlib, subprocess, sys
words = sys.argv[1:]
pathlib.Path({str(place / "words")!r}).write_text("\\n".join(words))
alone = {{"run", "--rm", "-i", "-t"}}
at, where = 0, "."
while words[at] in alone or words[at].startswith("-"):
    if words[at] == "-w":
        where = words[at + 1]
    at += 1 if words[at] in alone else 2
sys.exit(subprocess.run(words[at + 1:], cwd=where).returncode)
"""
    (place / "docker").write_text(docker, encoding="utf-8")
    (place / "gptworks").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m gptworks "$@"\n', encoding="utf-8")
    for file in place.iterdir():
        file.chmod(file.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{place}{os.pathsep}{os.environ['PATH']}")
    return place


@pytest.mark.slow
def test_s1_08_the_container_command_runs_what_is_inside(
    beside: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PWD", str(beside))
    assert foreign.run(beside, CONTAINER) == 0
    words = (stand_in / "words").read_text(encoding="utf-8").split("\n")
    at = words.index("oneflow-manylinux2014-cuda11.2:0.1")
    assert words[at + 1 : at + 9] == ["gptworks", "run", "--device", "cpu", "--shrink", "tiny", "--", "python3"]
    assert f"{beside}:{beside}" in words and words[words.index("-w") + 1] == str(beside)
    assert "--gpus" not in words
    found = foreign.losses(beside / "checkpoint")
    assert len(found) == 10 and (beside / "checkpoint" / "iter10_snapshot").is_dir()
    assert "must have gptworks in it" in capfd.readouterr().out
    monkeypatch.chdir(beside)
    assert foreign.train_again(beside, "oneflow_gpt.gptworks.yaml", "again") == found


def test_s1_08_every_flag_of_the_container_command_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PWD", str(tmp_path))
    found = foreign.translate(capsys, CONTAINER)
    assert foreign.noted(found) == {"--src", "--py", "--image", "--wheel", "--cmd"}
    hows = {note["theirs"]: note["how"] for note in found["notes"]}
    assert hows == {"--src": "mapped", "--py": "ignored", "--image": "mapped", "--wheel": "ignored", "--cmd": "mapped"}
    assert all(note["why"] for note in found["notes"] if note["how"] == "ignored")
    inside = found["arguments"][found["arguments"].index("--") :]
    assert inside[:6] == ["--", "gptworks", "run", "--", "python3", "-m"] and "--fp16" in inside
    more = CONTAINER.replace("--py 3.7", f"--py 3.7 --extra-mount {tmp_path} --proxy http://p:1 --no-interactive")
    arguments = foreign.translate(capsys, more)["arguments"]
    assert arguments.count("--mount") == 2 and "https_proxy=http://p:1" in arguments


def test_s1_08_an_unset_variable_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("SOURCES", raising=False)
    assert "$SOURCES is not set" in foreign.error_of(capsys, ["translate", "--", CONTAINER.replace("$PWD", "$SOURCES")])


def test_s1_04_a_known_name_says_nothing_about_what_is_in_a_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A whole command under the name of a shipped script: nothing of it comes from the shipped one."""
    (tmp_path / "examples").mkdir()
    script = tmp_path / "examples" / "pretrain_345M.sh"
    whole = "python3 -m oneflow_gpt.training --num-layers 36 --hidden-size 1280 --num-attention-heads 20 "
    whole += "--micro-batch-size 2 --global-batch-size 8 --dataset mine --seq-length 512 --train-iters 9 --save there\n"
    script.write_text(f"#!/bin/bash\nexport ONEFLOW_GPT_TRAIN_ITERS=77\n{whole}", encoding="utf-8")
    by_script = foreign.translate(capsys, "bash examples/pretrain_345M.sh", "--cwd", str(tmp_path))
    by_command = foreign.translate(capsys, whole, "--cwd", str(tmp_path))
    assert by_script["config"] == by_command["config"]
    assert by_script["config"]["model"]["num_layers"] == 36 and by_script["config"]["data"]["seq_len"] == 512
    script.write_text("export ONEFLOW_GPT_NUM_LAYERS=3\n", encoding="utf-8")
    told = foreign.error_of(capsys, ["translate", "--cwd", str(tmp_path), "--", "bash examples/pretrain_345M.sh"])
    assert "it starts no command" in told


# The whole document


@pytest.mark.slow
def test_x_01_document_1_as_one_story(
    tmp_path: Path,
    corpus_file: Path,
    small_tokenizer,
    stand_in: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Prepare, train by script, train by command into the folder of --load, in a container, then use the weights."""
    foreign.fill(tmp_path, corpus_file, small_tokenizer)
    monkeypatch.setenv("PWD", str(tmp_path))
    assert foreign.run(tmp_path, PREPARE) == 0
    script = "ONEFLOW_GPT_SAVE_PATH=by_script ONEFLOW_GPT_TRAIN_ITERS=3 bash example/pretrain_345M.sh"
    assert foreign.run(tmp_path, script) == 0
    assert not (tmp_path / "checkpoint").exists()
    assert foreign.run(tmp_path, TRAIN) == 0
    assert (tmp_path / "checkpoint" / "iter10_snapshot" / "snapshot_done").is_file()
    assert foreign.run(tmp_path, CONTAINER) == 0  # finds the checkpoint that is there
    assert len(foreign.losses(tmp_path / "checkpoint")) == 10
    capsys.readouterr()
    snapshot = str(tmp_path / "checkpoint" / "iter10_snapshot")
    generate = ["generate", "--model", snapshot, "-o", "model.num_heads=4", "--prompt", "The", "--max-new-tokens", "4"]
    generate += ["--device", "cpu", "--tokenizer", str(tmp_path / f"{DATASET}.tokenizer.json")]
    assert main(generate) == 0
    assert capsys.readouterr().out.startswith("The")
