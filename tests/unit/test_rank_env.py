"""Which rank this is, from the environment; which machine this is, from options and addresses."""

from pathlib import Path
from typing import Any

import pytest

from gptworks.errors import UsageError
from gptworks.launch import nodes, rank_env, rank_table
from gptworks.launch.nodes import Nodes
from gptworks.launch.rank_env import Placement

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "gpu[003-004,9],big1",
    "SLURM_TASKS_PER_NODE": "4(x2),1",
}


def test_no_environment_is_one_process() -> None:
    assert rank_env.read({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) == Placement(), "a batch script"
    assert rank_env.read({"RANK": "0", "WORLD_SIZE": "1"}) == Placement(started_by="torchrun")


def test_torchrun() -> None:
    assert rank_env.read(TORCHRUN) == Placement(5, 8, 1, 4, "10.0.0.1", 29500, "torchrun")


def test_srun_with_the_first_node_as_master_and_a_port_of_the_job() -> None:
    assert rank_env.read(SRUN) == Placement(5, 9, 1, 4, "gpu003", 20000 + 123456 % 20000, "srun")
    assert rank_env.read(SRUN | {"SLURM_NODEID": "2", "SLURM_PROCID": "8", "SLURM_LOCALID": "0"}).local_size == 1
    cyclic = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_PROCID": "3"}
    assert rank_env.read(SRUN | cyclic).local_size == 2, "ranks that are dealt out in turns"
    told = rank_env.read(SRUN | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert (told.master, told.port) == ("head", 1234)


def test_torchrun_inside_an_allocation_counts() -> None:
    assert rank_env.read(SRUN | TORCHRUN).started_by == "torchrun"


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "MASTER_ADDR": "head",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def test_mpirun() -> None:
    assert rank_env.read(OPEN_MPI) == Placement(5, 8, 1, 4, "head", 29500, "mpirun")
    assert rank_env.read(MPICH | {"MASTER_PORT": "7"}) == Placement(1, 2, 1, 2, "127.0.0.1", 7, "mpirun")
    assert rank_env.read({"PMI_RANK": "0", "PMI_SIZE": "1"}) == Placement(started_by="mpirun")


KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
    "PET_NPROC_PER_NODE": "4",
}


def test_kubeflow_says_which_machine_this_is() -> None:
    found = {"nnodes": "2", "node_rank": "1", "master": "job-node-0-0.job:29400", "nproc": "4"}
    assert rank_env.pod_options(KUBEFLOW) == found
    assert rank_env.read(KUBEFLOW | {"RANK": "1", "WORLD_SIZE": "2"}) == Placement(), "of a pod, not of a process"
    assert rank_env.pod_options(KUBEFLOW | {"PET_NPROC_PER_NODE": "auto"}) == {k: found[k] for k in list(found)[:3]}
    assert rank_env.pod_options({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2"}) == {"nproc": "2"}
    assert rank_env.pod_options(KUBEFLOW | TORCHRUN) == {}, "torchrun has read it"
    assert rank_env.read(KUBEFLOW | TORCHRUN).rank == 5
    with pytest.raises(UsageError, match=r"PET_NODE_RANK: 1, but RANK is 0 of WORLD_SIZE 2.*Found: PET_MASTER_ADDR"):
        rank_env.pod_options(KUBEFLOW | {"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(UsageError, match=r"PET_NODE_RANK: not set beside PET_NNODES=2.*Found: PET_MASTER_ADDR=job"):
        rank_env.pod_options({name: value for name, value in KUBEFLOW.items() if name != "PET_NODE_RANK"})


def test_what_can_be_told_to_the_other_ranks() -> None:
    assert rank_env.guess(TORCHRUN | {"LOCAL_RANK": "9"}) == Placement(5, 8, 0, 1, "10.0.0.1", 29500, "torchrun")
    assert rank_env.guess(TORCHRUN | {"MASTER_PORT": "x"}) is None
    assert rank_env.guess(TORCHRUN | {"RANK": "8"}) is None
    assert rank_env.guess(SRUN | {"SLURM_LOCALID": "9"}) == Placement(
        5, 9, master="gpu003", port=20000 + 123456 % 20000, started_by="srun"
    )
    assert rank_env.guess(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "x"}) == Placement(
        5, 8, master="head", port=29500, started_by="mpirun"
    )
    assert rank_env.guess({}) is None


@pytest.mark.parametrize(
    ("nodes_text", "first"),
    [("a", "a"), ("a,b", "a"), ("gpu[003-006]", "gpu003"), ("n[1,5]-ib,m2", "n1-ib"), ("r1c[07]", "r1c07")],
)
def test_the_first_of_a_list_of_nodes(nodes_text: str, first: str) -> None:
    assert rank_env.first_node(nodes_text) == first


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (TORCHRUN | {"RANK": "8"}, "RANK: 8 of WORLD_SIZE 8. Needed: a rank from 0 to 7"),
        (TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}, "WORLD_SIZE: 1, but LOCAL_WORLD_SIZE is 4"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK: 4 of LOCAL_WORLD_SIZE 4. Needed: 0 to 3"),
        (TORCHRUN | {"RANK": "x"}, "RANK: 'x' in the environment"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR: not set"),
        (TORCHRUN | {"MASTER_PORT": ""}, "MASTER_PORT: not set in the environment. Needed: a number, as torchrun"),
        ({k: v for k, v in TORCHRUN.items() if k != "LOCAL_RANK"}, "LOCAL_RANK: not set"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT: 70000. Needed: a port from 1 to 65535"),
        (
            TORCHRUN | {"RANK": "0"},
            "LOCAL_RANK: 1, above RANK 0.*Found: LOCAL_RANK=1, LOCAL_WORLD_SIZE=4",
        ),
        (TORCHRUN | {"RANK": "7"}, "RANK: 7 of WORLD_SIZE 8, but this machine has 2 processes after it"),
        ({"RANK": "0"}, "WORLD_SIZE: not set in the environment.*Found: RANK=0"),
        ({"WORLD_SIZE": "4"}, "RANK: not set in the environment"),
        (SRUN | {"SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST: not set"),
        (SRUN | {"SLURM_PROCID": "9"}, "SLURM_PROCID: 9 of SLURM_STEP_NUM_TASKS 9"),
        (SRUN | {"SLURM_LOCALID": "4"}, "SLURM_LOCALID: 4 of SLURM_STEP_TASKS_PER_NODE 4. Needed: 0 to 3"),
        (SRUN | {"SLURM_LOCALID": "3", "SLURM_PROCID": "2"}, "SLURM_LOCALID: 3, above SLURM_PROCID 2"),
        (SRUN | {"SLURM_PROCID": "8"}, "SLURM_PROCID: 8 of SLURM_STEP_NUM_TASKS 9, but this machine has 2 processes"),
        (
            SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
            r"SLURM_STEP_TASKS_PER_NODE: 4\(x2\), which is 8 tasks on 2 nodes, but SLURM_STEP_NUM_TASKS is 9.*Found",
        ),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "9"}, "which is 9 tasks on 1 nodes.*and SLURM_NODEID is 1"),
        (SRUN | {"SLURM_JOB_ID": "first"}, "SLURM_JOB_ID: 'first' in the environment"),
        (SRUN | TORCHRUN | {"WORLD_SIZE": "9", "RANK": "6"}, "RANK: 6, but SLURM_PROCID is 5. Needed: the same"),
        (OPEN_MPI | TORCHRUN | {"RANK": "6", "LOCAL_RANK": "2"}, "RANK: 6, but OMPI_COMM_WORLD_RANK is 5"),
        (OPEN_MPI | {"MASTER_ADDR": ""}, "MASTER_ADDR: not set, and OMPI_COMM_WORLD_SIZE is 8 with 4 on this machine"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "8"}, "OMPI_COMM_WORLD_RANK: 8 of OMPI_COMM_WORLD_SIZE 8"),
        (MPICH | {"MPI_LOCALRANKID": "2"}, "MPI_LOCALRANKID: 2 of MPI_LOCALNRANKS 2"),
        ({"PMI_RANK": "0"}, "PMI_SIZE: not set in the environment. Needed: a number, as mpirun sets it"),
    ],
)
def test_an_environment_that_is_not_whole_is_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rank_env.read(environment)


# Machines


def test_one_machine_unless_told() -> None:
    assert nodes.solve() == Nodes() == nodes.solve(nnodes="1")


def test_counted_machines() -> None:
    found = nodes.solve(nnodes="4", node_rank=2, master="10.0.0.1:1234")
    assert found == Nodes(4, 4, 2, "10.0.0.1", 1234)
    assert nodes.solve(nnodes="1:2", node_rank=0, master="h") == Nodes(2, 1, 0, "h", nodes.PORT)
    assert nodes.solve(nnodes="2", node_rank=0, master="[fe80::1]:7").master == "fe80::1"


def test_the_same_list_of_addresses_on_every_machine() -> None:
    """203.0.113.x is for documents: nobody has it."""
    addresses = ("203.0.113.1", "127.0.0.1")
    assert nodes.solve(node_ips=",".join(addresses)) == Nodes(2, 2, 1, addresses[0], nodes.PORT, addresses=addresses)
    assert nodes.solve(node_ips="127.0.0.2, 203.0.113.1").rank == 0
    assert nodes.solve(node_ips="127.0.0.1,127.0.0.2", node_rank=1).rank == 1


def table(tmp_path: Path, *machines: str) -> str:
    path = tmp_path / "table.json"
    merged = rank_table.merge([rank_table.make(range(4, 12), machine) for machine in machines])
    path.write_text(rank_table.dump(merged))
    return str(path)


def test_a_rank_table_says_machines_processes_and_devices(tmp_path: Path) -> None:
    file = table(tmp_path, "203.0.113.1", "127.0.0.1")
    second = nodes.solve(table=file, ranks="[8,16]")
    addresses = ("203.0.113.1", "127.0.0.1")
    assert second == Nodes(2, 2, 1, "203.0.113.1", nodes.PORT, tuple(range(4, 12)), (8, 8), addresses)
    assert nodes.solve(table=file) == second, "found by its address"
    assert nodes.solve(table=file, ranks="[0,8]").rank == 0
    assert nodes.solve(table=table(tmp_path, "203.0.113.1")).master == "127.0.0.1", "one machine meets itself"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nnodes": "2"}, "--nnodes 2: needs --master"),
        ({"nnodes": "2", "master": "a"}, "needs --node-rank, from 0 to 1"),
        ({"nnodes": "2", "master": "a", "node_rank": 2}, "--node-rank: 2 of 2 machines. Needed: 0 to 1"),
        ({"nnodes": "0"}, "--nnodes: '0'. Needed: a number of machines"),
        ({"nnodes": "2:1"}, "--nnodes: '2:1'"),
        ({"nnodes": "2", "node_rank": 0, "master": "a:x"}, "--master: 'a:x'"),
        ({"nnodes": "2", "node_rank": 0, "master": "10.0.0.300"}, "--master: '10.0.0.300' is not an address"),
        ({"node_ips": "10.0.0.1,http://b", "node_rank": 0}, "--node-ips: 'http://b'. Needed: ADDRESS or ADDRESS:PORT"),
        ({"node_ips": "10.0.0.1,the other", "node_rank": 0}, "--node-ips: 'the other' is not an address"),
        ({"node_ips": f"10.0.0.1,{'b' * 64}.c", "node_rank": 0}, "--node-ips: 'b+.c' is not an address"),
        ({"node_ips": "10.0.0.1,fe80::1::2", "node_rank": 0}, "--node-ips: 'fe80::1::2' is not an address"),
        ({"nnodes": "2", "node_ips": "a,b"}, "--nnodes and --node-ips: each says which machines"),
        ({"node_rank": 1}, "--node-rank: of how many machines"),
        ({"master": "a"}, "--master: of how many machines"),
        ({"ranks": "[0,8]"}, "--rank-range: .* Give --rank-table too"),
        ({"node_ips": "a,a"}, "--node-ips: 'a,a'"),
        ({"node_ips": "127.0.0.1,127.0.0.2"}, "127.0.0.1 and 127.0.0.2 of them are this machine.*--node-rank"),
        ({"node_ips": "203.0.113.1,203.0.113.2"}, "none of them is this machine.*--node-rank"),
    ],
)
def test_machines_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        nodes.solve(**options)


@pytest.mark.parametrize("node", [0, 1])
def test_a_rank_table_with_what_is_no_address_is_refused_on_every_machine(node: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"table.json: '10.1.1.256' is not an address. Needed: such as 10.0.0.1"):
        nodes.solve(table=table(tmp_path, "127.0.0.1", "10.1.1.256"), node_rank=node)


def test_a_range_and_a_node_rank_that_differ(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--node-rank: 0, but --rank-range \[8,16\] is node 1"):
        nodes.solve(table=table(tmp_path, "a", "b"), ranks="[8,16]", node_rank=0)
