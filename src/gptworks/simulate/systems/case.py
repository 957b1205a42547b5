"""A case of another system: its shape and layout, and what a card holds besides tensors.

No number here is fitted to a published figure: sizes come from shapes, and the constants are:

context     what a process holds before its first tensor. 1007 MiB on Volta: PyTorch 1.3 on a Titan V, measured in
            github.com/pytorch/pytorch/issues/28394 (1008.2 used after the first tensor, 0.9 before). 1687 MiB on
            Ampere: torch 1.8.2+cu111 on an RTX 3090, github.com/pytorch/pytorch/issues/55277. No such figure was found
            for OneFlow or Paddle: they load the same CUDA, cuBLAS, cuDNN and kernels of their own, so the same is used.
NCCL        nccl/src/init.cc and transport/p2p.cc: a connection to receive has a buffer of 512 KiB (LL) + 4.69 MiB
            (LL128) + 4 MiB (Simple) = 9.19, which cudaMalloc rounds to 10 MiB; a connection to send takes its least
            unit, 2 MiB. Rings and trees have two neighbours in every channel (with two ranks one): 24 MiB (12).
            Channels: twice the NVLinks that a card has to others of the group, so 12 among the 8 V100 of a machine
            (6 links), 8 among 4, 4 among 2; 24 among 8 A100 (NVSwitch); 2 between machines with one 100 Gb/s card.
"""

from dataclasses import dataclass, replace

CONTEXT = {"v100": 1007, "a100": 1687}
CARD = {"v100-16g": 16160, "v100-32g": 32510, "a100-40g": 40536}  # MiB in all, as nvidia-smi prints it
CHANNELS = {"v100": {8: 12, 4: 8, 2: 4}, "a100": {8: 24, 4: 24, 2: 24}}

Parts = dict[str, float]  # MiB


@dataclass(frozen=True)
class Case:
    hidden: int
    heads: int
    layers: int
    vocab: int  # as padded by the system
    seq_len: int
    micro_batch: int
    dp: int = 1
    tp: int = 1
    pp: int = 1
    accumulate: int = 1
    recompute: str = "full"  # none, core (the attention between its two linears), full (whole layers)
    zero: int = 0  # stage of the ZeRO sharding over the dp ranks
    card: str = "v100-16g"

    @property
    def chip(self) -> str:
        return self.card.split("-")[0]

    def parameters(self, first: bool = True, last: bool = True) -> int:
        """Parameters of one rank of a stage; the tied word embedding is held by the first and by the last stage."""
        h, t = self.hidden, self.tp
        layer = 12 * h * h // t + (7 * h // t) + 6 * h
        embeddings = (self.vocab // t * h if first or last else 0) + (self.seq_len * h if first else 0)
        return self.layers // self.pp * layer + embeddings + (2 * h if last else 0)

    def parts(self, states: Parts, peak: float, held: float, nccl: float) -> Parts:
        """What lies on the card: tensors at their peak, what the allocator holds above them, and all the rest."""
        return {
            **states,
            "activations": peak - sum(states.values()),
            "held by the allocator": held - peak,
            "NCCL": nccl,
            "context": CONTEXT[self.chip],
        }


def communicator(case: Case, ranks: int, machines: int) -> int:
    """MiB of the buffers of one NCCL communicator on one card."""
    if ranks == 1:
        return 0
    channels = 2 if machines > 1 else CHANNELS[case.chip][ranks]
    return channels * (12 if ranks == 2 else 24)


def model_of(case: Case) -> Case:
    """The case as one data-parallel rank sees it: the same for any number of them."""
    return replace(case, dp=1, zero=0, card="")


def machines_of(case: Case, ranks: int, stride: int) -> int:
    return max(1, -(-ranks * stride // 8)) if ranks > 1 else 1
