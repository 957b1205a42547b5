"""How much there is to compute in a block and in the head: FLOPs, bytes that are moved, kernels."""

from dataclasses import dataclass

from gptworks.plan.rates import Kernels
from gptworks.plan.sizes import block_matrices
from gptworks.plan.workload import LayoutChoice, Workload


@dataclass(frozen=True)
class Work:
    """Amounts: FLOPs of products, the same times (1/M + 1/N + 1/K), bytes, and kernels."""

    flops: float = 0.0
    slowed: float = 0.0
    bytes: float = 0.0
    kernels: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.flops + other.flops,
            self.slowed + other.slowed,
            self.bytes + other.bytes,
            self.kernels + other.kernels,
        )

    def __mul__(self, times: float) -> "Work":
        return Work(self.flops * times, self.slowed * times, self.bytes * times, self.kernels * times)


def _product(m: float, n: float, k: float, times: float = 1.0) -> Work:
    flops = 2 * m * n * k * times
    return Work(flops, flops * (1 / m + 1 / n + 1 / k))


@dataclass(frozen=True)
class BlockWork:
    """The work of one block on one micro-batch."""

    forward: Work
    backward: Work
    again: Work  # what is computed again in the backward pass


def block_work(workload: Workload, choice: LayoutChoice, facts: Kernels) -> BlockWork:
    model, tp = workload.model, choice.layout.tp
    micro_size, seq_len = choice.batch.micro_size, workload.seq_len
    heads = max(1, model.num_heads // tp)
    linear_attention, feed_forward = _linear(workload, choice, "attn."), _linear(workload, choice, "mlp.")
    fused = facts.fused_attention and model.attention == "auto"
    # A fused kernel skips what is hidden from a token because it comes later; what a window hides, it does not.
    seen = 0.5 if fused and not 0 < model.sliding_window < seq_len else 1.0
    attention = _product(seq_len, seq_len, model.head_size, micro_size * heads * 2 * seen)
    (moved, around), (moved_back, around_back) = (_bytes_moved(workload, choice, facts, way) for way in (0, 1))
    forward = linear_attention + feed_forward + attention + Work(bytes=moved + around, kernels=facts.kernels[0])
    backward = (linear_attention + feed_forward) * 2 + attention * (2.5 if fused else 2)
    backward += Work(bytes=moved_back + around_back, kernels=facts.kernels[1])
    again = {
        "none": Work(),
        "full": forward,
        "full_attn": linear_attention + attention + Work(bytes=around + moved / 2, kernels=facts.kernels[0] / 2),
        "core_attn": attention + Work(bytes=around, kernels=facts.kernels[0] / 4),
    }[choice.recompute]
    return BlockWork(forward, backward, again)


def _linear(workload: Workload, choice: LayoutChoice, module: str) -> Work:
    """Products of all tokens with the matrices of a module of a block."""
    tokens, work = choice.batch.micro_size * workload.seq_len, Work()
    for name, spec in block_matrices(workload.model).items():
        if name.startswith(module):
            cut = (choice.layout.tp if dim == spec.role.tp_dim else 1 for dim in (0, 1))
            outputs, inputs = (size / parts for size, parts in zip(spec.shape, cut, strict=True))
            work += _product(tokens, outputs, inputs)
    return work


def _bytes_moved(workload: Workload, choice: LayoutChoice, facts: Kernels, way: int) -> tuple[float, float]:
    """By norms, GELU, dropout and casts; and around the attention matrices. `way`: 0 forward, 1 backward."""
    model, tp = workload.model, choice.layout.tp
    tokens = choice.batch.micro_size * workload.seq_len
    stream = tokens * model.hidden_size / (tp if choice.parallel.sequence else 1)
    # Between the matrices: heads, and the feed-forward layer, whose 4 x hidden_size the numbers of `facts` are of. A
    # gated one has a second output, a product and a silu in the place of GELU.
    of_gpt2 = model.hidden_size + 4 * model.hidden_size
    gates = 2 if model.mlp == "swiglu" else 1
    inner = tokens * model.hidden_size / tp
    inner *= (model.num_heads * model.head_size + gates * model.ffn_size) / of_gpt2
    scores = choice.batch.micro_size * max(1, model.num_heads // tp) * workload.seq_len**2
    moved = stream * (facts.stream[way] + facts.dropout[way] * (model.dropout_hidden > 0))
    moved += inner * facts.inner[way]
    bytes_of_score = facts.scores[way] if model.attention == "auto" else facts.written_scores[way]
    return moved, scores * (bytes_of_score + facts.dropped_scores[way] * (model.dropout_attention > 0))


def head_work(workload: Workload, choice: LayoutChoice, facts: Kernels) -> Work:
    tokens = choice.batch.micro_size * workload.seq_len
    vocabulary = workload.model.vocab_size / choice.layout.tp
    return _product(tokens, vocabulary, workload.model.hidden_size, 3) + Work(bytes=tokens * vocabulary * facts.logits)
