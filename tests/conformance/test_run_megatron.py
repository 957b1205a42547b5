"""Megatron-LM's pretrain_gpt.py as its examples start it. Rows of the conformance list: S1-01, S1-03."""

import json
import runpy
from pathlib import Path

import foreign_runs as foreign
import numpy as np
import pytest

from gptworks.checkpoint.systems import registry
from gptworks.cli.main import main
from gptworks.config.load import from_dict, load
from gptworks.data.store import Store
from gptworks.interop import megatron
from gptworks.train import setup

PREPARE = """python tools/preprocess_data.py \\
       --input my-corpus.json \\
       --output-prefix my-gpt2 \\
       --vocab-file gpt2-vocab.json \\
       --dataset-impl mmap \\
       --tokenizer-type GPT2BPETokenizer \\
       --merge-file gpt2-merges.txt \\
       --append-eod
"""
# examples/pretrain_gpt.sh of 2021
TRAIN = """python pretrain_gpt.py \\
       --num-layers 24 \\
       --hidden-size 1024 \\
       --num-attention-heads 16 \\
       --micro-batch-size 4 \\
       --global-batch-size 8 \\
       --seq-length 1024 \\
       --max-position-embeddings 1024 \\
       --train-iters 500000 \\
       --lr-decay-iters 320000 \\
       --save checkpoints \\
       --load checkpoints \\
       --data-path my-gpt2_text_document \\
       --vocab-file gpt2-vocab.json \\
       --merge-file gpt2-merges.txt \\
       --data-impl mmap \\
       --split 949,50,1 \\
       --distributed-backend nccl \\
       --lr 0.00015 \\
       --min-lr 1.0e-5 \\
       --lr-decay-style cosine \\
       --weight-decay 1e-2 \\
       --clip-grad 1.0 \\
       --lr-warmup-fraction .01 \\
       --checkpoint-activations \\
       --log-interval 100 \\
       --save-interval 10000 \\
       --eval-interval 1000 \\
       --eval-iters 10 \\
       --fp16
"""
TODAY = (
    "torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 --sequence-parallel "
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 2 --global-batch-size 16 --train-samples 1600 --lr-decay-samples 1600 --lr-warmup-samples 160 "
    "--lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --bf16 --use-flash-attn --use-distributed-optimizer "
    "--overlap-grad-reduce --recompute-granularity selective --untie-embeddings-and-output-weights "
    "--tokenizer-type GPT2BPETokenizer --data-path 0.3 a 0.7 b --norm-epsilon 1e-6 --reset-position-ids "
    "--reset-attention-mask --eod-mask-loss --no-bias-gelu-fusion --distributed-timeout-minutes 5 --async-save "
    "--ffn-hidden-size 1024 --adam-beta2 0.95 --init-method-std 0.006"
)

LLAMA = (
    "torchrun --nproc_per_node 2 pretrain_gpt.py --tensor-model-parallel-size 2 --num-layers 4 --hidden-size 256 "
    "--num-attention-heads 8 --seq-length 128 --max-position-embeddings 256 --micro-batch-size 2 "
    "--global-batch-size 4 --train-iters 10 --lr 1e-4 --data-path x --tokenizer-type HuggingFaceTokenizer "
    "--vocab-size 512 --swiglu --normalization RMSNorm --position-embedding-type rope --rotary-base 500000 "
    "--rotary-percent 1.0 --use-rope-scaling --rope-scaling-factor 32 --group-query-attention --num-query-groups 2 "
    "--kv-channels 48 --disable-bias-linear --add-qkv-bias --qk-layernorm --window-size 63,0 "
    "--untie-embeddings-and-output-weights --norm-epsilon 1e-6 --no-rope-fusion --no-bias-swiglu-fusion --save out"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, corpus_file: Path, small_tokenizer) -> Path:
    made = tmp_path_factory.mktemp("megatron")
    foreign.fill(made, corpus_file, small_tokenizer)
    assert foreign.run(made, PREPARE) == 0
    return made


def test_s1_01_preprocess_data_of_megatron(folder: Path) -> None:
    assert Store(folder / "my-gpt2_text_document").num_documents == 160


def test_s1_03_the_samples_of_a_run_are_megatrons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What megatron-core's GPTDataset answered for the same data set, seed, split, length and number of samples."""
    folder = Path(__file__).parents[1] / "fixtures" / "orders"
    compared, orders = (
        runpy.run_path(str(folder / "check.py")),
        json.loads((folder / "megatron_orders.json").read_text()),
    )
    (case,) = [
        case
        for case in orders["cases"]
        if (case["stores"], case["seed"], case["seq_len"], case["split"]) == (["d10"], 7, 7, "80,10,10")
    ]
    compared["write_store"](tmp_path / "made_text_document", 0, orders["stores"]["d10"])
    command = (
        "python pretrain_gpt.py --num-layers 1 --hidden-size 16 --num-attention-heads 2 --micro-batch-size 1 "
        "--global-batch-size 1 --max-position-embeddings 7 --seq-length 7 --split 80,10,10 --seed 7 --lr 1e-3 "
        f"--train-iters {case['asked'][0]} --data-path made_text_document --save run --eval-interval 0"
    )
    assert main(["run", "--device", "cpu", "--cwd", str(tmp_path), "--", command]) == 0
    monkeypatch.chdir(tmp_path)
    samples = setup.prepare(load("pretrain_gpt.gptworks.yaml")).train_samples
    read = np.stack([sample.tokens for sample in samples.at(0, case["asked"][0])])
    answer = case["answer"][0]
    assert read[0, : len(answer["first"])].tolist() == answer["first"]
    assert compared["digest"](read) == answer["samples"]


def test_pretrain_gpt_runs_and_leaves_megatrons_checkpoint(folder: Path) -> None:
    assert foreign.run(folder, TRAIN) == 0
    found = foreign.losses(folder / "checkpoints")
    assert len(found) == 10 and found[-1][1] < found[0][1]
    assert foreign.train_again(folder, "pretrain_gpt.gptworks.yaml", "again") == found
    saved = folder / "checkpoints"
    assert (saved / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8") == "10"
    assert (saved / "iter_0000010" / "mp_rank_00" / "model_optim_rng.pt").is_file()
    opened = registry.open_any(saved / "iter_0000010", {})
    assert opened.system == "megatron" and opened.model.num_layers == 2 and opened.about["step"] == 10
    assert foreign.run(folder, TRAIN) == 0  # --load of what is there: nothing is left to do
    assert len(foreign.losses(saved)) == 10


def test_weights_that_megatron_wrote_are_the_start(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("10", encoding="utf-8")
    found = foreign.translate(capsys, TRAIN, "--cwd", str(tmp_path))
    assert found["config"]["init"]["checkpoint"] == "checkpoints"
    assert found["config"]["run"]["out"] == "checkpoints/gptworks" and found["remarks"]


def test_every_flag_is_noted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert foreign.noted(foreign.translate(capsys, TRAIN, "--cwd", str(folder))) == foreign.flags_in(TRAIN)
    assert foreign.noted(foreign.translate(capsys, TODAY)) == foreign.flags_in(TODAY)
    assert main(["translate", "--strict", "--", TRAIN]) == 0


def test_todays_flags_mean_what_they_mean(capsys: pytest.CaptureFixture[str]) -> None:
    config = foreign.translate(capsys, TODAY)["config"]
    layout = config["parallel"]
    assert {axis: layout[axis] for axis in ("pp", "dp", "fsdp", "tp")} == {"pp": 2, "dp": 1, "fsdp": 2, "tp": 2}
    assert (layout["zero"], layout["virtual_stages"], layout["schedule"]) == (1, 2, "interleaved")
    assert layout["sequence"] is True and layout["timeout"] == 300
    assert config["train"]["steps"] == 100 and config["optim"]["decay_steps"] == 100
    assert config["optim"]["warmup_steps"] == 10.0 and config["optim"]["beta2"] == 0.95
    assert config["data"]["path"] == ["a", "b"] and config["data"]["weights"] == [0.3, 0.7]
    assert all(config["data"][key] is True for key in ("reset_positions", "reset_attention", "mask_eod"))
    model = config["model"]
    assert (model["gelu"], model["tied"], model["layernorm_eps"], model["ffn_size"]) == ("erf", False, 1e-6, 1024)
    assert model["vocab_size"] == 50432  # a multiple of 128 x 2
    assert config["precision"]["compute"] == "bf16" and config["train"]["recompute"] == "core_attn"
    assert config["checkpoint"]["asynchronous"] is True


def test_defaults_of_2021_are_megatrons(capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        "python pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 2 "
        "--seq-length 64 --train-iters 9 --lr 1e-4 --data-path x --fp16"
    )
    config = foreign.translate(capsys, command)["config"]
    assert config["train"] == config["train"] | {"seed": 1234, "log_every": 100, "recompute": "none"}
    assert config["optim"] == config["optim"] | {
        "schedule": "linear", "weight_decay": 0.01, "beta2": 0.999, "clip": 1.0, "warmup_from": 0, "decay_steps": 9,
    }  # fmt: skip
    assert config["precision"]["scaler"] == {
        "init": 2.0**32, "window": 1000, "floor": 1.0, "hysteresis": 2, "refill": "growth",
    }  # fmt: skip
    assert config["data"] == config["data"] | {"split": "969,30,1", "order": "megatron"}
    assert config["evaluate"] == {"every": 1000, "batches": 100}
    assert config["model"] == config["model"] | {"gelu": "tanh", "max_positions": 64, "vocab_size": 50304}
    assert config["parallel"]["sequence"] is False


OTHER_VALUES = {
    "--num-layers": "12", "--hidden-size": "512", "--num-attention-heads": "8", "--micro-batch-size": "8",
    "--global-batch-size": "16", "--seq-length": "512", "--max-position-embeddings": "2048", "--train-iters": "9",
    "--lr-decay-iters": "9", "--save": "x", "--load": "x", "--data-path": "x", "--split": "1,1,1", "--lr": "1",
    "--min-lr": "0", "--lr-decay-style": "linear", "--weight-decay": "0", "--clip-grad": "3",
    "--lr-warmup-fraction": "0.5", "--log-interval": "3", "--save-interval": "3", "--eval-interval": "3",
    "--eval-iters": "3", "--ffn-hidden-size": "7", "--layernorm-epsilon": "1e-3", "--norm-epsilon": "1e-3",
    "--seed": "7", "--min-loss-scale": "2", "--hysteresis": "5", "--vocab-size": "60000",
    "--padded-vocab-size": "60000", "--make-vocab-size-divisible-by": "1000", "--lr-decay-samples": "80",
    "--lr-warmup-samples": "80", "--num-layers-per-virtual-pipeline-stage": "4", "--recompute-granularity": "selective",
    "--distributed-timeout-minutes": "7", "--adam-beta1": "0.5", "--adam-beta2": "0.5", "--adam-eps": "1e-3",
    "--hidden-dropout": "0", "--attention-dropout": "0", "--init-method-std": "0.5", "--initial-loss-scale": "8",
    "--loss-scale": "16", "--loss-scale-window": "9",
}  # fmt: skip
SWITCHES = [
    "--bf16", "--sequence-parallel", "--use-distributed-optimizer", "--reset-position-ids", "--reset-attention-mask",
    "--eod-mask-loss", "--untie-embeddings-and-output-weights", "--no-bias-gelu-fusion", "--async-save",
    "--recompute-activations", "--finetune",
]  # fmt: skip


def _meaning(translation: dict) -> str:
    return json.dumps([translation["config"], translation["arguments"]])


@pytest.mark.slow
@pytest.mark.parametrize("flag", sorted(OTHER_VALUES))
def test_changing_a_mapped_flag_changes_the_configuration(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = TRAIN.strip()
    if flag == "--recompute-granularity":
        base = foreign.without(base, "--checkpoint-activations")
    changed = f"{base} {flag} {OTHER_VALUES[flag]}"
    if flag in base.split():
        changed = foreign.with_value(base, flag, OTHER_VALUES[flag])
    assert _meaning(foreign.translate(capsys, base)) != _meaning(foreign.translate(capsys, changed)), flag


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_mapped_switch_changes_the_configuration(switch: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = foreign.without(foreign.without(TRAIN, "--checkpoint-activations"), "--fp16")
    if switch == "--use-distributed-optimizer":
        base = base.replace("python pretrain_gpt.py", "torchrun --nproc_per_node 2 pretrain_gpt.py")
    changed = f"{base} {switch}"
    assert _meaning(foreign.translate(capsys, base)) != _meaning(foreign.translate(capsys, changed))


@pytest.mark.parametrize("refused", ["--num-experts 8", "--fp8", "--multi-latent-attention", "--rotary-interleaved"])
def test_another_kind_of_model_is_refused_with_a_reason(refused: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = foreign.error_of(capsys, ["translate", "--", f"{TRAIN.strip()} {refused}"])
    assert refused.split()[0] in told and "is not supported" in told


def test_flags_of_a_llama(capsys: pytest.CaptureFixture[str]) -> None:
    found = foreign.translate(capsys, LLAMA)
    assert foreign.noted(found) == foreign.flags_in(LLAMA)
    model = found["config"]["model"]
    wanted = {
        "norm": "rmsnorm", "positions": "rope", "rope_theta": 500000.0, "mlp": "swiglu", "bias": "qkv", "qk_norm": True,
        "num_heads": 8, "num_kv_heads": 2, "head_size": 48, "sliding_window": 64, "tied": False, "layernorm_eps": 1e-6,
        "max_positions": 256, "vocab_size": 512, "ffn_size": 640,  # 2/3 of 1024, rounded down to a multiple of 64
    }  # fmt: skip
    assert model == model | wanted and "gelu" not in model
    assert model["rope_scaling"] == {"type": "llama3", "factor": 32.0, "original_max_positions": 8192}
    cfg = from_dict({"model": model, "train": {"steps": 1}}).model
    assert (cfg.rope_scaling.low_freq_factor, cfg.rope_scaling.high_freq_factor) == (1.0, 4.0)
    plain = foreign.translate(capsys, foreign.without(LLAMA, "--add-qkv-bias"))["config"]["model"]
    assert plain["bias"] == "none"
    older = LLAMA.replace("--position-embedding-type rope", "--use-rotary-position-embeddings")
    assert foreign.translate(capsys, older)["config"]["model"] == model
    stretched = LLAMA.replace("--use-rope-scaling --rope-scaling-factor 32", "--rotary-seq-len-interpolation-factor 4")
    scaling = foreign.translate(capsys, stretched)["config"]["model"]["rope_scaling"]
    assert scaling == {"type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("--normalization RMSNorm", "", "--qk-layernorm: queries and keys have an RMSNorm here"),
        ("--normalization RMSNorm", "--normalization L2Norm", "--normalization: got 'L2Norm'; needs one of LayerNorm"),
        ("--rotary-percent 1.0", "--rotary-percent 0.5", "--rotary-percent: 0.5; partial rotary embeddings"),
        ("--window-size 63,0", "--window-size 63", "--window-size: got '63'; needs two numbers"),
        ("--position-embedding-type rope", "--position-embedding-type alibi", "got 'alibi'; needs one of"),
        ("--save out", "--rotary-seq-len-interpolation-factor 2", "give one of them"),
    ],
)
def test_flags_of_a_llama_that_do_not_fit(
    before: str, after: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = foreign.error_of(capsys, ["translate", "--", LLAMA.replace(before, after)])
    assert said in " ".join(told.split())


def test_biases_beside_a_layernorm_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    told = foreign.error_of(capsys, ["translate", "--", f"{TRAIN.strip()} --disable-bias-linear"])
    assert "--disable-bias-linear: with LayerNorm" in told


def test_a_llama_is_trained_and_leaves_a_checkpoint_of_megatron_core(folder: Path) -> None:
    command = LLAMA.replace("torchrun --nproc_per_node 2", "python").replace("--tensor-model-parallel-size 2", "")
    command = command.replace("--use-rope-scaling --rope-scaling-factor 32", "").replace("--save out", "--save llama")
    command = foreign.with_value(foreign.without(command, "--add-qkv-bias"), "--train-iters", "2")
    assert foreign.run(folder, foreign.with_value(command, "--data-path", "my-gpt2_text_document")) == 0
    opened = registry.open_any(folder / "llama" / "iter_0000002").require_whole()
    assert opened.system == "megatron-core" and opened.model.num_kv_heads == 2 and opened.model.qk_norm


def test_mistakes_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    old = TRAIN.replace("--micro-batch-size 4", "--batch-size 4")
    assert "it became --micro-batch-size" in foreign.error_of(capsys, ["translate", "--", old])
    typo = TRAIN.replace("--clip-grad", "--clip-grads")
    assert "did you mean --clip-grad?" in foreign.error_of(capsys, ["translate", "--", typo])
    swapped = foreign.with_value(TRAIN, "--min-lr", "1")
    assert "--min-lr: 1 is above --lr" in foreign.error_of(capsys, ["translate", "--", swapped])
    ramp = f"{TRAIN.strip()} --rampup-batch-size 8 8 1000"
    assert "--rampup-batch-size" in foreign.error_of(capsys, ["translate", "--", ramp])
    strict = f"{TRAIN.strip()} --tensorboard-dir tb"
    assert "--tensorboard-dir: ignored" in foreign.error_of(capsys, ["translate", "--strict", "--", strict])


def test_several_machines_of_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    front = "torchrun --nproc_per_node=8 --nnodes=2 --node_rank=1 --master_addr=10.0.0.1 --master_port=6000 "
    command = TRAIN.replace("python ", front).replace("--global-batch-size 8", "--global-batch-size 64")
    found = foreign.translate(capsys, command)
    assert found["config"]["parallel"]["dp"] == 16
    assert found["arguments"][-8:] == [
        "--nproc", "8", "--nnodes", "2", "--master", "10.0.0.1:6000", "--node-rank", "1",
    ]  # fmt: skip


def test_generation_of_2021_reads_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        "python tools/generate_samples_gpt.py --num-layers 24 --hidden-size 1024 --load checkpoints "
        "--num-attention-heads 16 --max-position-embeddings 1024 --tokenizer-type GPT2BPETokenizer --fp16 "
        "--micro-batch-size 2 --seq-length 1024 --out-seq-length 64 --temperature 0.7 --vocab-file v --merge-file m "
        "--sample-input-file prompts.txt --top_p 0.9 --recompute"
    )
    found = foreign.translate(capsys, command)
    assert found["verb"] == "generate" and foreign.noted(found) == foreign.flags_in(command)
    assert found["arguments"][:4] == ["--model", "checkpoints", "--prompts", "prompts.txt"]
    assert found["arguments"][found["arguments"].index("--top-p") + 1] == "0.9"


def test_every_key_of_the_table_says_what_becomes_of_it() -> None:
    names = [key.theirs for key in megatron.TRAINING]
    assert len(names) == len(set(names))
