"""Sharding stages inside pipeline stages: none is downgraded. Row of the conformance list: S3-03."""

from typing import Any
from unittest import mock

import pytest
from steps import ONE, Case, assert_equal_to_one_process, run_steps

from gptworks.config.derive import Layout
from gptworks.launch.world import World

pytest.importorskip("gptworks.parallel.pipeline")

BLOCKS, ROOT, MICRO = 2, 1, 4  # of each of two stages


@pytest.mark.parametrize(
    "schedule",
    [{}, pytest.param({"schedule": "interleaved", "virtual_stages": 2}, marks=pytest.mark.slow)],
    ids=["1f1b", "interleaved"],
)
def test_s3_03_stage_3_with_a_pipeline_really_reshards(run_layout, schedule: dict[str, Any]) -> None:
    model = {"num_layers": 2 * BLOCKS}
    wanted = run_steps(ONE, Case(MICRO, model=model))

    def counted(world: World) -> Any:
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

        found = {}
        for zero in (1, 2, 3):
            case = Case(MICRO, model=model, parallel={"zero": zero, **schedule})
            with (
                mock.patch.object(groups, "foreach_all_gather", wraps=groups.foreach_all_gather) as gather,
                mock.patch.object(groups, "foreach_reduce", wraps=groups.foreach_reduce) as scatter,
            ):
                reports = run_steps(world, case)
            found[zero] = (reports, gather.call_count / len(reports), scatter.call_count / len(reports))
        return found

    ranks = run_layout(Layout(pp=2, fsdp=2), counted)
    for zero in (1, 2, 3):
        assert_equal_to_one_process([found[zero][0] for found in ranks], wanted, zero)
    for found in ranks:
        gathers, scatters = ({zero: found[zero][kind] for zero in found} for kind in (1, 2))
        # once per step, but for the first, in which the stages also find out their shapes
        assert gathers[1] == gathers[2] < 1.5 * (ROOT + BLOCKS)
        assert gathers[3] >= MICRO * 2 * BLOCKS, "parameters stayed gathered between micro-batches"
        assert scatters == {1: ROOT + BLOCKS, 2: MICRO * (ROOT + BLOCKS), 3: MICRO * (ROOT + BLOCKS)}
