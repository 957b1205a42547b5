"""The closed forms of communication, against numbers worked out by hand. What really happens: tests/distributed."""

import pytest

from gptworks.config.derive import BatchPlan, Layout
from gptworks.config.presets import model_config, names
from gptworks.config.schema import ModelConfig, ParallelConfig
from gptworks.plan.communication import Term, on_the_wire, per_step, totals
from gptworks.plan.rank_parameters import stages_here
from gptworks.plan.sizes import num_parameters
from gptworks.plan.workload import LayoutChoice, Workload

SMALL = ModelConfig(num_layers=6, hidden_size=384, num_heads=6, vocab_size=50304, max_positions=256)


@pytest.mark.parametrize("preset", names())
def test_the_parameters_of_all_ranks_are_those_of_the_model(preset: str) -> None:
    """Whole in one process; over stages a tied embedding twice; over tp what is not cut once per rank."""
    model = model_config(preset)
    assert num_numbers(model, ParallelConfig()) == num_parameters(model)
    copy = model.vocab_size * model.hidden_size if model.tied else 0
    assert sum(num_numbers(model, ParallelConfig(pp=2), pp=rank) for rank in (0, 1)) == num_parameters(model) + copy
    norms = 2 if model.norm == "layernorm" else 1  # gains, and shifts
    heads = 2 * model.head_size if model.qk_norm else 0
    biases = 2 * model.hidden_size if model.bias == "all" else 0  # of what gives to the stream
    whole = model.num_layers * (2 * norms * model.hidden_size + heads + biases) + norms * model.hidden_size
    whole += model.max_positions * model.hidden_size if model.positions == "learned" else 0
    assert sum(num_numbers(model, ParallelConfig(tp=2), tp=rank) for rank in (0, 1)) == num_parameters(model) + whole


def num_numbers(model: ModelConfig, parallel: ParallelConfig, **place: int) -> int:
    stages = stages_here(model, parallel, Layout(**dict.fromkeys(("pp", "dp", "fsdp", "tp"), 0) | place))
    return sum(parameter.size for stage in stages for parameter in stage.parameters)


def sent(parallel: ParallelConfig, batch: BatchPlan, coords: Layout | None = None) -> list[Term]:
    return per_step(Workload(SMALL, 256), LayoutChoice(parallel, batch), coords)


def test_one_process_sends_nothing() -> None:
    assert sent(ParallelConfig(), BatchPlan(8, 8, 1, 1)) == []


def test_numbers_of_the_page_on_parallelism() -> None:
    """8 rows of 256 tokens; stream = 8 x 256 x 384 numbers of 4 bytes."""
    stream, parameters = 8 * 256 * 384 * 4, 30_062_592 * 4
    blocks = parameters - (50304 + 256 + 2) * 384 * 4
    assert totals(sent(ParallelConfig(dp=2), BatchPlan(8, 4, 1, 2))) == {("dp", "all_reduce"): parameters + 8 + 48}
    assert totals(sent(ParallelConfig(fsdp=2), BatchPlan(8, 4, 1, 2))) == {
        ("fsdp", "all_reduce"): 8 + 48,
        ("fsdp", "all_gather"): parameters + blocks,
        ("fsdp", "reduce_scatter"): parameters,
    }
    whole = (6 * 6 + 2 + 256) * 384 * 4  # norms and biases of 6 blocks, the last norm, positions
    assert totals(sent(ParallelConfig(tp=2), BatchPlan(8, 8, 1, 1))) == {
        ("tp", "all_reduce"): 3 * 8 * 256 * 4 + whole + 48,
        ("tp", "all_gather"): (6 * 6 + 2) * stream,
        ("tp", "reduce_scatter"): (4 * 6 + 2) * stream,
    }
    assert totals(sent(ParallelConfig(pp=2), BatchPlan(8, 2, 4, 1))) == {
        ("pp", "all_reduce"): 48,
        ("pp", "send"): stream + 50304 * 384 * 4,
    }


def test_a_middle_stage_sends_both_ways_and_no_embedding() -> None:
    parallel = ParallelConfig(pp=3)
    terms = sent(parallel, BatchPlan(8, 1, 8, 1), Layout(1, 0, 0, 0))
    assert [term.payload for term in terms if term.kind == "send"] == ["hidden states", "gradients of hidden states"]


def test_on_the_wire() -> None:
    """Of 4 ranks each has to give 3 quarters away, and of a sum to get them back as well."""
    assert on_the_wire("all_gather", 400, 4) == on_the_wire("reduce_scatter", 400, 4) == 300
    assert on_the_wire("all_to_all", 400, 4) == 300
    assert on_the_wire("all_reduce", 400, 4) == 600
    assert on_the_wire("send", 400, 4) == 400
