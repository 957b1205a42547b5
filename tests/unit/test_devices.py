"""Which device a process takes, with numbers of devices that are patched: no GPU is needed."""

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed

from gptworks.config.derive import Layout
from gptworks.config.schema import RunFolderConfig
from gptworks.errors import ConfigError
from gptworks.launch import devices, process_group, rank_env, rendezvous
from gptworks.launch.devices import pick_device


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """cuda(2, visible="0,1"): a machine on which torch finds two devices."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def patch(count: int, visible: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return patch


def test_a_device_of_cuda_always_has_a_number(cuda: Any) -> None:
    cuda(4)
    assert pick_device("cuda") == pick_device("auto") == torch.device("cuda", 0)
    assert [pick_device("cuda", rank, 4).index for rank in range(4)] == [0, 1, 2, 3]
    assert pick_device("cpu", 3, 4) == torch.device("cpu")


def test_the_only_process_keeps_the_device_that_its_user_chose(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda(4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert pick_device("cuda") == torch.device("cuda", 2)
    assert pick_device("cuda", 1, 4) == torch.device("cuda", 1)


def test_one_visible_device_for_each_task_is_device_0(cuda: Any) -> None:
    """srun --gpus-per-task=1: the local rank is 3, and what the process sees is its own."""
    cuda(1, visible="3")
    assert pick_device("cuda", 3, 4) == torch.device("cuda", 0)


@pytest.mark.parametrize("local_rank", [2, 3])
def test_a_half_visible_set_is_refused_by_the_processes_that_have_none(cuda: Any, local_rank: int) -> None:
    cuda(2, visible="0,1")
    with pytest.raises(ConfigError) as caught:
        pick_device("cuda", local_rank, 4)
    needed = f"{local_rank + 1} or more processes on this machine, and each sees 2 devices (CUDA_VISIBLE_DEVICES=0,1)"
    assert needed in str(caught.value)
    assert "--gpus-per-task=1" in str(caught.value)


def test_launchers_that_do_not_say_how_many_processes_a_machine_has(cuda: Any) -> None:
    """Two machines with 4 devices each, and no LOCAL_WORLD_SIZE: mpirun and many a cluster tell only LOCAL_RANK."""
    cuda(4)
    told = {"WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    places = [rank_env.read(told | {"RANK": str(4 + local), "LOCAL_RANK": str(local)}) for local in range(4)]
    assert [pick_device("cuda", place.local_rank, place.local_size).index for place in places] == [0, 1, 2, 3]


@pytest.mark.parametrize(("count", "visible", "absent"), [(1, "0,9", "9"), (2, "GPU-a,GPU-b,GPU-c", "GPU-c")])
def test_a_visible_device_that_is_not_there(cuda: Any, count: int, visible: str, absent: str) -> None:
    cuda(count, visible=visible)
    with pytest.raises(ConfigError, match=f"{count} of them can be used: {absent} is not there"):
        pick_device("cuda", 0, 1)


def test_a_list_that_is_ended_on_purpose(cuda: Any) -> None:
    cuda(1, visible="0,-1,1")
    assert pick_device("cuda", 0, 1) == torch.device("cuda", 0)


def test_no_device_at_all_names_what_hides_them(cuda: Any) -> None:
    cuda(0, visible="7")
    with pytest.raises(ConfigError, match=r"cuda is not available here \(CUDA_VISIBLE_DEVICES=7\)"):
        pick_device("cuda")


def test_what_a_launcher_needs_before_it_starts_processes(cuda: Any) -> None:
    cuda(2)
    devices.require(2, ())
    devices.require(2, (0, 1))
    with pytest.raises(ConfigError, match="process 2 of this machine has no device: there are 2"):
        devices.require(3, ())
    with pytest.raises(ConfigError, match="rank table names device 5 of this machine, which has 2"):
        devices.require(2, (0, 5))


# What the ranks find out together


def said(device: str, process: str = "process 7 on a", visible: str | None = None) -> dict[str, Any]:
    return {"device": device, "process": process, "visible": visible}


def test_two_ranks_that_share_a_device_are_named() -> None:
    assert rendezvous.refused_devices([said("cuda GPU-1"), said("cuda GPU-2")]) == ""
    assert rendezvous.refused_devices([said("cpu "), said("cpu ")]) == ""
    text = rendezvous.refused_devices(
        [said("cuda GPU-1"), said("cuda GPU-2"), said("cuda GPU-1", "process 9 on b", "0")]
    )
    assert "ranks 0 and 2 share one device (GPU-1)" in text
    assert "process 9 on b sees CUDA_VISIBLE_DEVICES=0" in text


def test_ranks_with_devices_of_two_kinds() -> None:
    text = rendezvous.refused_devices([said("cuda GPU-1"), said("cpu ", visible="")])
    assert (
        "rank 1 (process 7 on a, CUDA_VISIBLE_DEVICES=) has cpu, rank 0 (process 7 on a, all devices) has cuda" in text
    )


# What torch is given


def test_the_device_is_set_before_the_group_is_made(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the checks that torch 2.13 makes in init_process_group."""
    cuda(4)
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set_device", device)))

    def init_process_group(backend: str, *, device_id: torch.device, timeout: timedelta, **_: Any) -> None:
        assert device_id.type == "cuda"
        assert device_id.index is not None, "Please use a device_id with index."
        assert device_id.index < torch.cuda.device_count(), "device_id is out of range."
        calls.append((backend, device_id, timeout.total_seconds()))

    monkeypatch.setattr(distributed, "init_process_group", init_process_group)
    monkeypatch.setattr(process_group, "_mesh", lambda *_: None)
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(distributed.distributed_c10d, name, None)
    place = rank_env.Placement(2, 4, 2, 4, "127.0.0.1", 1, "torchrun")
    device = process_group._take_device("cuda", place)
    world = process_group.join(Layout(dp=4), 2, device, timeout=600)
    assert calls == [("set_device", device), ("nccl", device, 1260.0)]
    assert world.device == torch.device("cuda", 2)
    # Groups that are made later: NCCL's own limit comes after the heartbeat's, gloo gives up by itself.
    limits = distributed.distributed_c10d.default_pg_timeout, distributed.distributed_c10d.default_pg_nccl_timeout
    assert limits == (timedelta(seconds=600), timedelta(seconds=1260))


def test_one_process_alone_has_a_numbered_device_too(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda(2)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    from gptworks.config.schema import ParallelConfig

    assert process_group.start(ParallelConfig(), RunFolderConfig(device="cuda")).device == torch.device("cuda", 0)
    assert chosen == [torch.device("cuda", 0)]


def test_the_flight_recorder_is_on_and_writes_beside_the_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE")
    for name in (*names, "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    import os

    process_group.set_up_nccl(torch.device("cpu"), "/logs")
    assert not any(name in os.environ for name in names)
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    process_group.set_up_nccl(torch.device("cuda", 1), "/logs")
    assert [os.environ[name] for name in names] == ["2000", "0", "/logs/collectives-rank-"]
