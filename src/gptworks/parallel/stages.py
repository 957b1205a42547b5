"""What a pipeline stage keeps of a model."""

from gptworks.architecture import EMBEDDING, HEAD, modules_of
from gptworks.config.stages import STAGES_PER_RANK, assign_layers, check_micro_batches, check_schedule, stages_of
from gptworks.model import GPT

__all__ = ["STAGES_PER_RANK", "assign_layers", "check_micro_batches", "check_schedule", "keep_stage", "stages_of"]


def keep_stage(model: GPT, stage: int, num_stages: int) -> None:
    """Leave out of the model what other stages hold. What stays keeps its name."""
    kept = {str(layer) for layer in assign_layers(model.cfg.num_layers, num_stages)[stage]}
    for name in [name for name in model.blocks if name not in kept]:
        del model.blocks[name]
    absent = [] if stage == 0 else modules_of(EMBEDDING)
    absent += [] if stage == num_stages - 1 else modules_of(HEAD)
    for name in absent:
        setattr(model, name, None)
