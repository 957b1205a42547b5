"""Rank tables: the format to the letter, ranges, merging, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from gptworks.errors import UsageError
from gptworks.launch import rank_table

FIRST, SECOND = "10.155.111.140", "10.155.111.141"
DEVICES = [f"192.{1 + i % 4}.27.{6 + i // 4}" for i in range(8)]


def two_machines() -> rank_table.RankTable:
    return rank_table.merge([rank_table.make(range(8), FIRST, DEVICES), rank_table.make(range(8), SECOND)])


def test_the_table_of_one_machine_has_every_field_of_the_format() -> None:
    data = json.loads(rank_table.dump(rank_table.make(range(8), FIRST, DEVICES)))
    assert data == {
        "version": "1.0",
        "server_count": "1",
        "server_list": [
            {
                "server_id": FIRST,
                "device": [{"device_id": str(i), "device_ip": DEVICES[i], "rank_id": str(i)} for i in range(8)],
                "host_nic_ip": "reserve",
            }
        ],
        "status": "completed",
    }
    assert list(data) == ["version", "server_count", "server_list", "status"]


def test_merging_counts_machines_and_goes_on_counting_ranks() -> None:
    table = two_machines()
    data = json.loads(rank_table.dump(table))
    assert data["server_count"] == "2"
    assert [server["server_id"] for server in data["server_list"]] == [FIRST, SECOND]
    devices = data["server_list"][1]["device"]
    assert [device["rank_id"] for device in devices] == [str(rank) for rank in range(8, 16)]
    assert [device["device_id"] for device in devices] == [str(device) for device in range(8)]
    assert rank_table.default_name(table) == "hccl_2s_16p.json"


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(rank_table.dump(two_machines()))
    assert rank_table.read(path) == two_machines()


def test_the_range_of_the_second_machine_starts_at_its_first_rank() -> None:
    table = two_machines()
    assert table.server_of(rank_table.parse_range("[0,8]", "--rank-range")) == 0
    assert table.server_of(rank_table.parse_range("[8,16]", "--rank-range")) == 1
    with pytest.raises(UsageError, match=r"\[0,16\] are not the ranks of one machine.*Use \[0,8\] or \[8,16\]"):
        table.server_of(range(16))


@pytest.mark.parametrize("text", ["[8,16]", "[8,16)", "8,16", " [ 8 , 16 ] "])
def test_a_range_leaves_out_its_end(text: str) -> None:
    assert rank_table.parse_range(text, "--x") == range(8, 16)


@pytest.mark.parametrize("text", ["", "8", "[8]", "[8,8]", "[9,8]", "[-1,8]", "[a,b]", "[0,8]x", "0:8"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--x: .* is not a range. Needed: \[first,end\]"):
        rank_table.parse_range(text, "--x")


def test_addresses_of_devices_come_from_the_machine_where_it_lists_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = tmp_path / "hccn.conf"
    listed.write_text("address_0=192.98.92.100\nnetmask_0=255.255.255.0\naddress_1=192.98.93.100\n")
    monkeypatch.setattr(rank_table, "_DEVICE_ADDRESSES", listed)
    table = rank_table.make(range(3), FIRST)
    assert [device.address for device in table.servers[0].devices] == ["192.98.92.100", "192.98.93.100", FIRST]
    assert rank_table.default_name(table) == f"hccl_3p_012_{FIRST}.json"


def broken(**changes: Any) -> dict[str, Any]:
    return json.loads(rank_table.dump(two_machines())) | changes


def with_device(**changes: Any) -> dict[str, Any]:
    data = broken()
    data["server_list"][1]["device"][2] |= changes
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "server_list: missing"),
        (broken(server_list=[]), "server_list: no machines"),
        (broken(server_count="3"), "server_count: 3, but server_list has 2"),
        (broken(server_count="two"), "server_count: 'two' is not a number"),
        (broken(status="initializing"), "status: 'initializing'. Needed: 'completed'"),
        (with_device(rank_id="2"), r"server_list\[1\].device\[2\].rank_id: 2. Needed: 10"),
        (with_device(rank_id=True), r"server_list\[1\].device\[2\].rank_id: True is not a number"),
        (with_device(device_id="1"), r"server_list\[1\].device: a device_id appears twice"),
        (broken(server_list=[broken()["server_list"][0]] * 2), r"server_list\[1\].device\[0\].rank_id: 0. Needed: 8"),
        (broken(server_count="1", server_list=[{"server_id": FIRST}]), r"server_list\[0\].device: missing"),
        (broken(server_count="1", server_list=[{"device": []}]), r"server_list\[0\].device: no devices"),
    ],
)
def test_a_wrong_table_is_refused_with_the_place(data: Any, message: str) -> None:
    with pytest.raises(UsageError, match=f"T: {message}"):
        rank_table.parse(data, "T")


def test_numbers_may_be_numbers() -> None:
    data = with_device(rank_id=10, device_id=2)
    assert rank_table.parse(data, "T") == two_machines()


def test_merging_a_machine_twice_is_refused() -> None:
    with pytest.raises(UsageError, match=f"machine {FIRST} is in two"):
        rank_table.merge([rank_table.make(range(2), FIRST)] * 2)


def test_one_address_for_each_device() -> None:
    with pytest.raises(UsageError, match="--device-ips: 2 addresses for 3 devices"):
        rank_table.make(range(3), FIRST, ["a", "b"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "not JSON"),
        ("3", "server_list"),
        ("[" * 100_000, "nested too deep"),
        ("9" * 5000, "not JSON .*4300 digits"),
        ('{"server_list": [1], "server_count": "%s"}' % ("9" * 5000), "server_count: '999.* is not a number"),
    ],
)
def test_a_file_that_is_no_table(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=f"{path}: .*{message}|{path}: {message}"):
        rank_table.read(path)
