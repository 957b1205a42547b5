"""Logits, every gradient and twenty training losses equal to Hugging Face's GPT-2 with the same weights.

Weights travel through folders: written by transformers and read by us, and the other way round.
"""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, GPT2LMHeadModel

import gptworks
from gptworks.checkpoint.pretrained import PretrainedGPT
from gptworks.checkpoint.systems import huggingface
from gptworks.checkpoint.systems.huggingface_families import GPT2
from gptworks.config import from_dict
from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.launch.world import World
from gptworks.model import GPT, IGNORED
from gptworks.parallel.build import FreshWeights, build_gpt
from gptworks.train.loop import train

VARIANTS = {
    "gpt2": {},
    "erf gelu": {"activation_function": "gelu"},
    "sigmoid gelu": {"activation_function": "quick_gelu"},
    "untied": {"tie_word_embeddings": False},
    "narrow ffn": {"n_inner": 40},
    "other eps": {"layer_norm_epsilon": 1e-2},
    "one head": {"n_head": 1},
}
PRECISIONS = {"fp32": (torch.float32, 1e-5), "fp64": (torch.float64, 1e-10)}
HFFolder = Callable[..., tuple[Path, GPT2LMHeadModel]]


def example(vocab_size: int = 101) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(0, vocab_size, (3, 20), generator=generator)
    labels = torch.randint(0, vocab_size, (3, 20), generator=generator)
    labels[0, 5:9] = IGNORED
    labels[2] = torch.where(torch.arange(20) < 17, labels[2], IGNORED)
    return tokens, labels


def in_precision(model: GPT, dtype: torch.dtype) -> GPT:
    model.compute_dtype = dtype
    return model.to(dtype)


def assert_close(got: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    """Relative to the largest value of the tensor: the smallest ones are sums of large terms that cancel."""
    assert got.shape == wanted.shape, what
    assert got.dtype == wanted.dtype, what
    error = ((got - wanted).abs().max() / wanted.abs().max()).item()
    assert error <= tolerance, f"{what}: {error:.2e}"


def assert_same_model(ours: GPT, theirs: GPT2LMHeadModel, tolerance: float) -> None:
    """Logits, loss, and the gradient of every parameter."""
    tokens, labels = example(ours.cfg.vocab_size)
    logits = theirs(tokens).logits
    assert logits.abs().max() > 1.0, "the weights are too small to tell right from wrong"
    assert_close(ours(tokens).detach(), logits.detach(), tolerance, "logits")

    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    expected.backward()
    loss = ours(tokens, labels=labels)
    loss.backward()
    assert_close(loss.detach(), expected.detach(), tolerance, "loss")
    wanted = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    mine = {GPT2.rule(name).theirs[0]: (name, parameter.grad) for name, parameter in ours.named_parameters()}
    assert set(mine) == set(wanted)
    for theirs_name, (name, gradient) in mine.items():
        (as_theirs,) = GPT2.rule(name).to_theirs(gradient, ours.cfg.head_size)
        assert_close(as_theirs, wanted[theirs_name], tolerance, f"gradient of {name}")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_their_folder_read_by_us(variant: str, precision: str, hf_folder: HFFolder) -> None:
    dtype, tolerance = PRECISIONS[precision]
    folder, theirs = hf_folder(**VARIANTS[variant])
    ours = in_precision(PretrainedGPT.from_pretrained(folder), dtype)
    assert_same_model(ours, theirs.to(dtype), tolerance)


@pytest.mark.parametrize("attention", ["auto", "math"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("gelu", ["tanh", "erf", "sigmoid"])
def test_our_folder_read_by_them(gelu: str, precision: str, attention: str, tmp_path: Path) -> None:
    dtype, tolerance = PRECISIONS[precision]
    cfg = ModelConfig.model_validate(
        {
            "num_layers": 2,
            "hidden_size": 24,
            "num_heads": 3,
            "ffn_size": 56,
            "vocab_size": 97,
            "max_positions": 32,
            "gelu": gelu,
            "tied": gelu == "tanh",
            "attention": attention,
        }
    )
    ours = build_gpt(cfg, World(torch.device("cpu")), torch.float32, FreshWeights(InitConfig(std=0.3), 2, 3)).eval()
    huggingface.save(tmp_path / "out", cfg, dict(ours.named_parameters()), eod_id=96)
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert theirs.config.tie_word_embeddings is cfg.tied
    assert_same_model(in_precision(ours, dtype), theirs.to(dtype), tolerance)


def test_there_and_back_is_the_same_to_the_bit(hf_folder: HFFolder, tmp_path: Path) -> None:
    for number, variant in enumerate(VARIANTS.values()):
        folder, theirs = hf_folder(**variant)
        ours = PretrainedGPT.from_pretrained(folder)
        back = tmp_path / f"back-{number}"
        huggingface.save(back, ours.cfg, dict(ours.named_parameters()), eod_id=100)
        first, second = load_file(folder / "model.safetensors"), load_file(back / "model.safetensors")
        assert set(first) == set(second) and len(first) > 30
        for name, tensor in first.items():
            assert torch.equal(tensor, second[name]), name
        reread = GPT2LMHeadModel.from_pretrained(back).config
        for key in ("n_layer", "n_head", "n_embd", "n_positions", "vocab_size", "activation_function", "eos_token_id"):
            assert getattr(reread, key) == getattr(theirs.config, key), key
        for key in ("layer_norm_epsilon", "tie_word_embeddings", "embd_pdrop", "resid_pdrop", "attn_pdrop"):
            assert getattr(reread, key) == getattr(theirs.config, key), key


# Training

STEPS, ROWS, LENGTH, LR, MIN_LR, WARMUP, DECAY, CLIP = 20, 4, 24, 3e-3, 1e-4, 5, 0.1, 0.7


def training_config(store: Path, folder: Path, out: Path) -> dict[str, Any]:
    model = huggingface.read_config(folder).model_dump()
    return {
        "model": model,
        "init": {"checkpoint": str(folder)},
        "data": {
            "path": str(store),
            "seq_len": LENGTH,
            "order": "sequential",
            "split": "1,0,0",
            "mask_eod": True,
            "reset_positions": True,
            "reset_attention": True,
        },
        "batch": {"global_size": ROWS, "micro_size": 2},
        "optim": {"lr": LR, "min_lr": MIN_LR, "warmup_steps": WARMUP, "weight_decay": DECAY, "clip": CLIP},
        "train": {"steps": STEPS, "log_every": 1},
        "run": {"out": str(out), "device": "cpu"},
    }


def independent_losses(model: GPT2LMHeadModel, tokens: np.ndarray, eod_id: int) -> list[float]:
    """The same training, written with transformers and torch alone."""
    model.train()
    named = dict(model.named_parameters())
    plain = [n for n in named if n.endswith("bias") or ".ln_" in n]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named.items() if n not in plain], "weight_decay": DECAY},
            {"params": [named[n] for n in plain], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    losses = []
    for step in range(1, STEPS + 1):
        if step <= WARMUP:
            lr = LR * step / WARMUP
        else:
            lr = MIN_LR + (LR - MIN_LR) * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        starts = [LENGTH * ((step - 1) * ROWS + row) for row in range(ROWS)]
        windows = torch.tensor(np.stack([tokens[s : s + LENGTH + 1] for s in starts]).astype(np.int64))
        loss_sum, scored = torch.zeros(()), 0
        for window in windows:
            # A document at a time: no attention, no position and no scored target crosses its end.
            ends = [0, *(i + 1 for i in range(LENGTH) if window[i] == eod_id), LENGTH]
            for begin, end in itertools.pairwise(ends):
                if begin == end:
                    continue
                targets = window[begin + 1 : end + 1].clone()
                targets[window[begin:end] == eod_id] = IGNORED
                logits = model(window[None, begin:end]).logits[0]
                loss_sum = loss_sum + F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
                scored += int((targets != IGNORED).sum())
        loss = loss_sum / scored
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def trained(
    small_store: Path, hf_folder: HFFolder, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, GPT2LMHeadModel]:
    """(run folder, folder of the first weights, a model with the first weights)."""
    folder, theirs = hf_folder(vocab_size=512, bos_token_id=511, eos_token_id=511)
    with torch.no_grad():  # the weights of a real start
        for name, parameter in theirs.named_parameters():
            if parameter.dim() == 2:
                parameter *= 0.1
            else:
                parameter.fill_(1.0 if ".ln_" in name and name.endswith("weight") else 0.0)
    theirs.save_pretrained(folder)
    cfg = from_dict(training_config(small_store, folder, tmp_path_factory.mktemp("trained") / "run"))
    outcome = train(cfg)
    assert outcome.stopped_by == "end" and outcome.step == STEPS
    return outcome.folder, folder, theirs


def test_twenty_training_losses(trained: tuple[Path, Path, GPT2LMHeadModel], small_store: Path) -> None:
    run, _, theirs = trained
    ours = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    tokens = np.fromfile(small_store.with_suffix(".bin"), dtype=np.uint16)
    assert (tokens[: STEPS * ROWS * LENGTH] == 511).sum() > 10, "no document ends here: nothing is masked or reset"
    expected = independent_losses(theirs, tokens, eod_id=511)
    assert expected[-1] < expected[0] - 0.5
    assert ours == pytest.approx(expected, rel=1e-5)


def test_our_checkpoint_loads_in_transformers(
    trained: tuple[Path, Path, GPT2LMHeadModel], corpus_file: Path, small_tokenizer: Any
) -> None:
    run, _, _ = trained
    portable = run / "checkpoints" / f"step-{STEPS:08d}" / "portable"
    theirs = GPT2LMHeadModel.from_pretrained(portable, attn_implementation="eager").eval()
    ours = gptworks.GPT.from_pretrained(run)
    tokens, _ = example(512)
    with torch.no_grad():
        wanted = theirs(tokens).logits
        assert_close(ours(tokens), wanted, 1e-5, "logits")
    first = gptworks.GPT.from_pretrained(trained[1])
    assert (first(tokens) - wanted).abs().max() > 0.1, "training changed nothing"

    tokenizer = AutoTokenizer.from_pretrained(portable)
    text = corpus_file.read_text(encoding="utf-8")[:3000] + "<|endoftext|> Zoë said: 'naïve' 東京 🙂\n\n  end"
    assert tokenizer(text)["input_ids"] == small_tokenizer.encode(text)
    assert tokenizer.decode(small_tokenizer.encode(text)) == text
    assert tokenizer.eos_token_id == 511 == theirs.config.eos_token_id
