"""DeepSpeed around Megatron's model."""

from gptworks.simulate.systems.case import CONTEXT, Case, Parts, communicator, machines_of
from gptworks.simulate.systems.megatron import MegatronStage
from gptworks.simulate.systems.schedule import forget
from gptworks.simulate.systems.trace import MIB, Recorder


def deepspeed(case: Case) -> Parts:
    """DeepSpeed ZeRO 1 and 2 (runtime/zero/stage_1_and_2.py) around Megatron's model; what the allocator holds beyond
    the tensors is not traced.

    fp16 weights; fp32 master, moments and gradient of this rank's part; fp16 gradients: all of them in stage 1, this
    rank's part in stage 2, where two buckets of 5e8 elements collect the rest (reduce_bucket_size, overlap_comm).
    """
    n = case.parameters() / MIB
    with Recorder() as recorder:
        stage = MegatronStage(case, 0)
        if case.zero == 2:
            for p in stage.parameters:
                p.register_post_accumulate_grad_hook(forget)
        stage(None).backward()
    step = recorder.peak / MIB - 2 * n
    shared = {"gradients of the part": 2 * n / case.dp, "buckets": 2 * 5e8 * 2 / MIB} if case.zero == 2 else {}
    return {
        "weights": 2 * n,
        "activations" if case.zero == 2 else "activations and gradients": step,
        **shared,
        "fp32 gradients": 4 * n / case.dp,
        "optimizer": 12 * n / case.dp,
        "NCCL": 2 * communicator(case, case.dp, machines_of(case, case.dp, 1)),
        "context": CONTEXT[case.chip],
    }
