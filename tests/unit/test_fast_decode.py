"""Tokens read in C++, and models whose matrices are kept in fewer bits."""

from typing import Any

import pytest
import torch

from gptworks.config.schema import GenerateConfig, InitConfig, ModelConfig
from gptworks.errors import UsageError
from gptworks.generate import fast_decode
from gptworks.generate.engine import continue_tokens
from gptworks.generate.fast_decode import MOST_TOKENS, Decoder
from gptworks.launch.world import World
from gptworks.model import GPT, inference
from gptworks.model.inference import StoredEmbedding, StoredMatrix, store_weights
from gptworks.parallel.build import FreshWeights, build_gpt

needs_compiler = pytest.mark.skipif(fast_decode.why_not() is not None, reason=f"no fast steps: {fast_decode.why_not()}")
CONFIG = ModelConfig(num_layers=2, hidden_size=48, num_heads=4, vocab_size=301, max_positions=64)
SIZES = ("num_layers", "hidden_size", "num_heads", "vocab_size", "max_positions")
PROMPTS = [[5, 9, 200, 31], [77, 4, 18, 250, 3, 300]]
GREEDY = GenerateConfig(strategy="greedy", max_new_tokens=12)
# How near to the model, as a part of the largest logit. Tokens are rounded to 16 bits before int8 and int4 matrices.
CLOSENESS = {"fp32": 1e-5, "bf16": 1e-5, "int8": 2**-12, "int4": 2**-12}


def model_of(cfg: ModelConfig = CONFIG, std: float = 0.3) -> GPT:
    weights = FreshWeights(InitConfig(std=std), cfg.num_layers, seed=3)
    return build_gpt(cfg, World(torch.device("cpu")), torch.float32, weights).eval()


def tokens_of(model: GPT, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [found[0].tokens for found in continue_tokens(model, prompts, GREEDY)]


def stepped(model: GPT, tokens_BT: torch.Tensor, read_first: int, decoder: Decoder | None) -> torch.Tensor:
    """The logits after each further token, [T, B, V], through the cache."""
    rows = len(tokens_BT)
    cache = model.new_cache(rows, tokens_BT.shape[1])
    model(tokens_BT[:, :read_first], cache=cache, last_only=True)
    found = []
    for place in range(read_first, tokens_BT.shape[1]):
        one_B1 = tokens_BT[:, place : place + 1].contiguous()
        if decoder:
            found.append(decoder.read(one_B1[:, 0], range(rows), [place] * rows, range(rows), cache))
        else:
            found.append(model(one_B1, cache=cache, last_only=True))
    return torch.stack(found)


def read_rows(decoder: Decoder, model: GPT, tokens_BT: torch.Tensor, chunk: int) -> torch.Tensor:
    """The logits after every token, [B, T, V]: all rows in one batch, chunk by chunk."""
    rows, length = tokens_BT.shape
    cache, found = model.new_cache(rows, length), []
    for first in range(0, length, chunk):
        part_BC = tokens_BT[:, first : first + chunk]
        slots = torch.arange(rows).repeat_interleave(part_BC.shape[1])
        positions = torch.arange(first, first + part_BC.shape[1]).repeat(rows)
        logits = decoder.read(part_BC.flatten(), slots, positions, range(part_BC.numel()), cache)
        found.append(logits.view(*part_BC.shape, -1))
    return torch.cat(found, 1)


@needs_compiler
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("kind", inference.WEIGHTS)
@torch.no_grad()
def test_steps_equal_those_of_the_model(rows: int, kind: str) -> None:
    model = model_of()
    store_weights(model, kind)
    tokens = torch.randint(0, CONFIG.vocab_size, (rows, 12), generator=torch.Generator().manual_seed(rows))
    expected = stepped(model, tokens, 5, None)
    decoder = Decoder.of(model)
    assert decoder is not None
    found = stepped(model, tokens, 5, decoder)
    assert (found - expected).abs().max() <= CLOSENESS[kind] * max(1.0, expected.abs().max().item())


@needs_compiler
@pytest.mark.parametrize(
    "shape",
    [
        {"tied": False},
        {"gelu": "erf"},
        {"gelu": "sigmoid"},
        {"layernorm_eps": 0.1},
        {"hidden_size": 20, "num_heads": 5, "ffn_size": 27, "vocab_size": 3},  # nothing is a multiple of 8
        {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "ffn_size": 1, "vocab_size": 1},
    ],
)
@pytest.mark.parametrize("kind", inference.WEIGHTS)
@torch.no_grad()
def test_every_shape_of_model(shape: dict[str, Any], kind: str) -> None:
    cfg = ModelConfig(**(CONFIG.model_dump(include=set(SIZES)) | shape))
    model = model_of(cfg)
    store_weights(model, kind)
    tokens = torch.randint(0, cfg.vocab_size, (3, 9), generator=torch.Generator().manual_seed(1))
    decoder = Decoder.of(model)
    assert decoder is not None
    expected, found = stepped(model, tokens, 1, None), stepped(model, tokens, 1, decoder)
    assert (found - expected).abs().max() <= CLOSENESS[kind] * max(1.0, expected.abs().max().item())


@needs_compiler
@pytest.mark.parametrize("rows", [1, 3, 9])
@torch.no_grad()
def test_two_threads_and_matrices_of_several_chunks(rows: int) -> None:
    cfg = ModelConfig(num_layers=2, hidden_size=520, num_heads=4, vocab_size=301, max_positions=16)
    weights = FreshWeights(InitConfig(std=0.02), cfg.num_layers, seed=3)
    model = build_gpt(cfg, World(torch.device("cpu")), torch.float32, weights).eval()
    tokens = torch.randint(0, cfg.vocab_size, (rows, 12), generator=torch.Generator().manual_seed(1))
    decoder, threads = Decoder.of(model), torch.get_num_threads()
    assert decoder is not None
    torch.set_num_threads(2)
    try:
        found = stepped(model, tokens, 2, decoder)
    finally:
        torch.set_num_threads(threads)
    expected = stepped(model, tokens, 2, None)
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())


@needs_compiler
@torch.no_grad()
def test_the_caches_are_left_alike() -> None:
    model = model_of()
    decoder = Decoder.of(model)
    assert decoder is not None
    caches = [model.new_cache(2, 9) for _ in range(2)]
    for cache in caches:
        cache.counts_B = torch.tensor([2, 4])  # rows of different lengths
        model(torch.tensor([[1, 2, 0, 0], [3, 4, 5, 6]]), cache=cache, last_only=True)
        cache.used = 4
    theirs = model(torch.tensor([[7], [8]]), cache=caches[0], last_only=True)
    ours = decoder.read([7, 8], [0, 1], [2, 4], [0, 1], caches[1])
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for name in ("keys_LBNSH", "values_LBNSH"):
        torch.testing.assert_close(getattr(caches[1], name), getattr(caches[0], name), atol=1e-5, rtol=1e-5)


_LLAMA = {"norm": "rmsnorm", "positions": "rope", "mlp": "swiglu", "bias": "none", "tied": False, "ffn_size": 80}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA | {"num_kv_heads": 2, "layernorm_eps": 1e-6},
    "llama3": _LLAMA
    | {"num_kv_heads": 1, "rope_theta": 500.0}
    | {"rope_scaling": {"type": "llama3", "factor": 8.0, "original_max_positions": 16}},
    "linear": _LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "yarn": _LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_positions": 16}},
    "mistral": _LLAMA | {"num_kv_heads": 2, "sliding_window": 5},
    "mistral, wide": _LLAMA | {"num_kv_heads": 2, "sliding_window": 21, "tied": True},
    "qwen2": _LLAMA | {"num_kv_heads": 2, "bias": "qkv"},
    "qwen3": _LLAMA | {"num_kv_heads": 2, "qk_norm": True, "head_size": 20},
    "smollm": _LLAMA | {"tied": True, "num_kv_heads": 4},
    "no positions": _LLAMA | {"positions": "none"},
    "gpt without biases": {"bias": "none"},
    "gpt with rope": {"positions": "rope", "bias": "qkv", "gelu": "erf"},
}


@needs_compiler
@pytest.mark.parametrize("kind", ["fp32", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_family_equals_the_model_and_is_independent_of_the_batch(family: str, kind: str) -> None:
    cfg = ModelConfig(**(CONFIG.model_dump(include=set(SIZES)) | FAMILIES[family]))
    model = model_of(cfg, std=0.2)
    store_weights(model, kind)
    decoder = Decoder.of(model)
    assert decoder is not None, fast_decode.why_not(cfg)
    tokens_BT = torch.randint(0, cfg.vocab_size, (3, 37), generator=torch.Generator().manual_seed(1))
    expected_BTV, found_BTV = model(tokens_BT), read_rows(decoder, model, tokens_BT, 37)
    assert (found_BTV - expected_BTV).abs().max() <= CLOSENESS[kind] * max(1.0, expected_BTV.abs().max().item())
    for chunk in (1, 3, 8):
        assert torch.equal(read_rows(decoder, model, tokens_BT, chunk), found_BTV), chunk


WIDE = ModelConfig(num_layers=2, hidden_size=264, num_heads=4, vocab_size=301, max_positions=64, ffn_size=1100)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", inference.WEIGHTS)
@torch.no_grad()
def test_rows_apart_and_side_by_side_give_the_same_bits(kind: str, threads: int) -> None:
    """Which of the two a processor gets is chosen by who made it."""
    model = model_of(WIDE, std=0.1)
    store_weights(model, kind)
    tokens = torch.randint(0, WIDE.vocab_size, (2, 21), generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        apart, beside = (Decoder(model, is_apart=is_apart) for is_apart in (True, False))
        for rows, chunk in ((1, 1), (1, 3), (2, 1), (2, 4), (2, 21)):
            found, expected = (read_rows(each, model, tokens[:rows], chunk) for each in (apart, beside))
            assert torch.equal(found, expected), (rows, chunk)
    finally:
        torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize("kind", inference.WEIGHTS)
@torch.no_grad()
def test_the_numbers_of_a_token_do_not_depend_on_the_batch(kind: str) -> None:
    """Bit for bit: alone or among others, in chunks of any size. The sizes are such that there is a rest of everything:
    more than a chunk of the depth, more than a block of outputs, more than a panel of tokens."""
    model = model_of(WIDE, std=0.1)
    store_weights(model, kind)
    decoder = Decoder.of(model)
    assert decoder is not None
    tokens_BT = torch.randint(0, WIDE.vocab_size, (3, 37), generator=torch.Generator().manual_seed(1))
    alone_BTV = torch.cat([read_rows(decoder, model, row_T[None], 1) for row_T in tokens_BT])
    for chunk in (1, 2, 3, 4, 5, 8, 16, 37):
        assert torch.equal(read_rows(decoder, model, tokens_BT, chunk), alone_BTV), chunk
    expected_BTV = model(tokens_BT)
    assert (alone_BTV - expected_BTV).abs().max() <= CLOSENESS[kind] * expected_BTV.abs().max()


def in_16_bits(x_D: torch.Tensor) -> torch.Tensor:
    """As the C++ function rounds what it multiplies by whole numbers: a scale for each 1024 numbers."""
    parts = x_D.split(1024)
    return torch.cat([(part * (32767 / part.abs().max())).round() * (part.abs().max() / 32767) for part in parts])


@needs_compiler
@pytest.mark.parametrize("size", [48, 264, 1100, 2080])
@pytest.mark.parametrize("kind", ["int8", "int4"])
@torch.no_grad()
def test_products_of_whole_numbers_are_exact(kind: str, size: int) -> None:
    """Of a model whose blocks add nothing, so that a logit is one product of a row of the head with a rounded token."""
    model = model_of(ModelConfig(num_layers=1, hidden_size=size, num_heads=4, vocab_size=301, max_positions=8), std=0.1)
    for part in (model.blocks["0"].attn.out, model.blocks["0"].mlp.down):
        part.weight.zero_(), part.bias.zero_()
    store_weights(model, kind)
    decoder = Decoder.of(model)
    assert decoder is not None
    found_TV = read_rows(decoder, model, torch.tensor([[3, 300, 7, 8, 9]]), 5)[0]
    for position, token in enumerate((3, 300, 7, 8, 9)):
        x_D = model.ln_f(model.wte(torch.tensor(token)) + model.wpe.weight[position])
        expected_V = model.head.matrix.rows(slice(None)).double() @ in_16_bits(x_D).double()
        # A number on the border between two steps may be rounded to either.
        assert (found_TV[position] - expected_V).abs().max() <= 1e-5 * expected_V.abs().max()
        assert (found_TV[position] - model.head.weight.double() @ x_D.double()).abs().max() > 1e-7


@needs_compiler
@pytest.mark.parametrize("kind", inference.WEIGHTS)
@torch.no_grad()
def test_what_is_not_a_number_stays_so(kind: str) -> None:
    model = model_of()
    model.blocks["0"].ln1.bias[3] = torch.nan
    store_weights(model, kind)
    decoder = Decoder.of(model)
    assert decoder is not None
    assert read_rows(decoder, model, torch.tensor([[1, 2]]), 1).isnan().all()


@needs_compiler
@torch.no_grad()
def test_one_batch_may_hold_steps_pieces_of_prompts_and_drafts() -> None:
    model = model_of()
    decoder = Decoder.of(model)
    assert decoder is not None
    tokens_BT = torch.randint(0, CONFIG.vocab_size, (3, 24), generator=torch.Generator().manual_seed(2))
    expected_BTV = read_rows(decoder, model, tokens_BT, 24)
    cache = model.new_cache(5, 30)
    decoder.read(tokens_BT[0, :9], [4] * 9, range(9), [], cache)
    decoder.read(tokens_BT[1, :2], [0] * 2, range(2), [], cache)
    # A step in slot 4, five more of a prompt in slot 0, and all of another in slot 2; logits of some, in any order.
    pieces = [(4, 0, 9, 10), (0, 1, 2, 7), (2, 2, 0, 24)]
    flat = torch.cat([tokens_BT[row, first:end] for _, row, first, end in pieces])
    slots = [slot for slot, _, first, end in pieces for _ in range(first, end)]
    positions = [position for _, _, first, end in pieces for position in range(first, end)]
    found = decoder.read(flat, slots, positions, [29, 0, 3, 5], cache)
    wanted = [expected_BTV[2, 23], expected_BTV[0, 9], expected_BTV[1, 4], expected_BTV[1, 6]]
    assert torch.equal(found, torch.stack(wanted))


@needs_compiler
@torch.no_grad()
def test_more_tokens_than_are_read_in_one_call() -> None:
    cfg = CONFIG.model_copy(update={"max_positions": 700, "num_layers": 1})
    model = model_of(cfg)
    decoder = Decoder.of(model)
    assert decoder is not None
    assert MOST_TOKENS < 600
    tokens_T = torch.randint(0, cfg.vocab_size, (600,), generator=torch.Generator().manual_seed(2))
    whole, pieces = model.new_cache(1, 600), model.new_cache(1, 600)
    found = decoder.read(tokens_T, [0] * 600, range(600), [599, 3, 511, 512], whole)
    decoder.read(tokens_T[:600:1][:200], [0] * 200, range(200), [], pieces)
    rest = decoder.read(tokens_T[200:], [0] * 400, range(200, 600), [399, 311, 312], pieces)
    assert torch.equal(found[[0, 2, 3]], rest)
    assert torch.equal(whole.keys_LBNSH, pieces.keys_LBNSH)


@needs_compiler
def test_what_cannot_be_read_is_refused() -> None:
    model = model_of()
    decoder, cache = Decoder.of(model), model.new_cache(2, 4)
    assert decoder is not None
    before = cache.keys_LBNSH.clone()
    for token, slot, position in ((301, 0, 0), (-1, 0, 0), (5, 2, 0), (5, -1, 0), (5, 1, 4), (5, 1, -1)):
        needed = "needs a token below 301, a slot below 2 and a position below 4"
        text = f"token {token} of slot {slot} at position {position}; {needed}"
        with pytest.raises(UsageError, match=text):
            decoder.read([1, token], [0, slot], [0, position], [0], cache)
    with pytest.raises(UsageError, match=r"got 2 tokens, 1 slots and 2 positions"):
        decoder.read([1, 2], [0], [0, 1], [0], cache)
    with pytest.raises(UsageError, match=r"wanted is \[2\]; needs places among 2 tokens"):
        decoder.read([1, 2], [0, 0], [0, 1], [2], cache)
    with pytest.raises(UsageError, match=r"the cache is not in fp32"):
        decoder.read([1], [0], [0], [0], model.new_cache(2, 4, torch.bfloat16))
    assert torch.equal(cache.keys_LBNSH, before), "something was written"


@needs_compiler
def test_what_it_does_not_know_is_left_to_the_model() -> None:
    assert Decoder.of(model_of()) is not None
    assert Decoder.of(model_of().train()) is None
    half = model_of()
    half.compute_dtype = torch.bfloat16
    assert Decoder.of(half) is None
    other = model_of()
    other.head = torch.nn.Linear(48, 301, bias=False)  # type: ignore[assignment]
    assert Decoder.of(other) is None
    stage = model_of()
    del stage.blocks["1"]
    assert Decoder.of(stage) is None
    for cast in (torch.nn.Module.half, torch.nn.Module.bfloat16, torch.nn.Module.double):
        assert Decoder.of(cast(model_of())) is None  # type: ignore[operator]
    hooked = model_of()
    hooked.blocks["0"].register_forward_hook(lambda *_: None)
    assert Decoder.of(hooked) is None
    other = model_of()
    other.blocks["1"].ln2 = torch.nn.Identity()
    assert Decoder.of(other) is None


@needs_compiler
def test_generation_goes_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = model_of(), []
    real = Decoder.read
    monkeypatch.setattr(Decoder, "read", lambda self, *given: calls.append(len(given[0])) or real(self, *given))
    with_it = tokens_of(model)
    assert calls == [10] + [2] * 11  # both prompts are read in one go and give the first of 12 tokens
    monkeypatch.setattr(fast_decode, "why_not", lambda: "switched off")
    calls.clear()
    assert tokens_of(model) == with_it
    assert not calls


@needs_compiler
def test_a_window_that_slides_goes_through_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = model_of(), []
    slide = GREEDY.model_copy(update={"window": "slide"})
    prompts = [[1] * 70, list(range(60))]  # longer than the context of 64, and soon to be
    real = Decoder.read
    monkeypatch.setattr(Decoder, "read", lambda self, *given: calls.append(len(given[0])) or real(self, *given))
    with_it = [found[0].tokens for found in continue_tokens(model, prompts, slide)]
    assert calls[:2] == [64, 60]
    monkeypatch.setattr(fast_decode, "why_not", lambda: "switched off")
    assert [found[0].tokens for found in continue_tokens(model, prompts, slide)] == with_it


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("kind", "width", "closeness"), [("bf16", 2, 0.02), ("int8", 1, 0.03), ("int4", 1, 0.25)])
@torch.no_grad()
def test_kept_weights_take_less_and_predict_nearly_the_same(
    tied: bool, kind: str, width: int, closeness: float
) -> None:
    cfg = CONFIG.model_copy(update={"tied": tied})
    model, kept = model_of(cfg), model_of(cfg)
    store_weights(kept, kind)
    assert isinstance(kept.wte, StoredEmbedding)
    matrices = {m.values.data_ptr(): m for m in kept.modules() if isinstance(m, StoredMatrix)}
    assert len(matrices) == 4 * 2 + (1 if tied else 2)
    assert all(m.values.element_size() == width for m in matrices.values())
    tokens = torch.tensor([PROMPTS[1]])
    exact, near = model(tokens), kept(tokens)
    assert 0 < (near - exact).abs().max() < closeness * exact.abs().max()
    loss, near_loss = model.loss(tokens), kept.loss(tokens)
    assert abs(near_loss - loss) < closeness * loss


def test_int8_rows_of_zeros_stay_zero() -> None:
    matrix = StoredMatrix(torch.tensor([[0.0, 0.0], [1.0, -2.0]]), "int8")
    assert matrix.rows(slice(None)).tolist() == [[0.0, 0.0], pytest.approx([1.0, -2.0], abs=2 / 127)]


def test_int4_takes_four_and_a_half_bits_and_is_nearer_than_q4_0() -> None:
    """q4_0 takes the scale that makes the number furthest from zero -8; the one that fits best is nearer."""
    weight = torch.randn(60, 100, generator=torch.Generator().manual_seed(1))
    matrix = StoredMatrix(weight, "int4")
    assert matrix.scale is not None
    assert matrix.values.nbytes + matrix.scale.nbytes == 60 * 4 * (16 + 2)  # 100 numbers are four groups
    groups = torch.nn.functional.pad(weight, (0, 28)).view(60, 4, 32)
    scale = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8
    q4_0 = ((groups / scale + 8.5).floor().clamp(0, 15) - 8) * scale
    found = matrix.rows(slice(None))
    assert found.shape == weight.shape
    ours, theirs = (found - weight).square().sum(), (q4_0.flatten(1)[:, :100] - weight).square().sum()
    assert 0 < ours < theirs
    assert torch.equal(matrix.rows(torch.tensor([7, 3])), found[[7, 3]])


@pytest.mark.parametrize("tied", [True, False])
def test_words_and_the_head_have_eight_bits_beside_four(tied: bool) -> None:
    model = model_of(CONFIG.model_copy(update={"tied": tied}))
    store_weights(model, "int4")
    eight = {name for name, each in model.named_buffers() if each.dtype == torch.int8}
    assert eight == {"wte.matrix.values"} | (set() if tied else {"head.matrix.values"})
    assert all(each.dtype == torch.uint8 for name, each in model.blocks.named_buffers() if name.endswith(".values"))


def test_int4_groups_of_zeros_stay_zero() -> None:
    assert StoredMatrix(torch.zeros(2, 40), "int4").rows(slice(None)).tolist() == [[0.0] * 40] * 2


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UsageError, match=r"weights: got 'int5'; needs one of fp32, bf16, int8, int4"):
        store_weights(model_of(), "int5")


def test_all_kinds_are_listed_once() -> None:
    import argparse

    from gptworks.cli import options

    parser = argparse.ArgumentParser()
    options.add_weights_option(parser)
    (action,) = [a for a in parser._actions if a.dest == "weights"]
    assert tuple(action.choices or ()) == inference.WEIGHTS
