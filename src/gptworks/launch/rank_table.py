"""Rank tables: the JSON file that says which machine holds which ranks on which devices (the hccl format)."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptworks import json_text
from gptworks.errors import UsageError

VERSION, STATUS, HOST_NIC = "1.0", "completed", "reserve"
_DEVICE_ADDRESSES = Path("/etc/hccn.conf")  # lines such as address_0=192.168.100.101


@dataclass(frozen=True)
class Device:
    device: int
    address: str
    rank: int


@dataclass(frozen=True)
class Server:
    address: str
    devices: tuple[Device, ...]

    @property
    def ranks(self) -> range:
        return range(self.devices[0].rank, self.devices[-1].rank + 1)


@dataclass(frozen=True)
class RankTable:
    servers: tuple[Server, ...]

    @property
    def world_size(self) -> int:
        return sum(len(server.devices) for server in self.servers)

    def server_of(self, ranks: range) -> int:
        """The number of the machine that holds exactly these ranks."""
        for number, server in enumerate(self.servers):
            if server.ranks == ranks:
                return number
        fitting = " or ".join(span(server.ranks) for server in self.servers)
        raise UsageError(f"--rank-range: {span(ranks)} are not the ranks of one machine of the table. Use {fitting}.")


def parse_range(text: str, option: str) -> range:
    """[8,16], also [8,16) or 8,16: from the first up to the last, which is not included."""
    match = re.fullmatch(r"\s*\[?\s*(\d+)\s*,\s*(\d+)\s*[\])]?\s*", text)
    if not match or int(match[1]) >= int(match[2]):
        raise UsageError(
            f"{option}: '{text}' is not a range. Needed: [first,end] with first < end, end not included, such as [0,8]."
        )
    return range(int(match[1]), int(match[2]))


def span(ranks: range) -> str:
    return f"[{ranks.start},{ranks.stop}]"


def read(path: Path) -> RankTable:
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise UsageError(f"{path}: cannot be read ({reason}). Needed: a rank table in JSON.") from None
    try:
        data = json_text.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}: not JSON (line {error.lineno}: {error.msg}). Needed: a rank table.") from None
    except ValueError as error:  # nested too deep, or a number of thousands of digits
        raise UsageError(f"{path}: not JSON ({error}). Needed: a rank table.") from None
    return parse(data, str(path))


def parse(data: Any, source: str) -> RankTable:
    """Checked in full: a table that is wrong in one place starts processes that wait for each other for ever."""

    def refuse(where: str, got: str, needed: str) -> UsageError:
        return UsageError(f"{source}: {where}: {got}. Needed: {needed}.")

    def number(value: Any, where: str) -> int:
        if isinstance(value, bool) or not re.fullmatch(r"\d{1,9}", str(value)):
            raise refuse(where, f"{repr(value)[:80]} is not a number", "a number from 0 on, as a string")
        return int(value)

    def field(item: Any, name: str, where: str) -> Any:
        if not isinstance(item, dict) or name not in item:
            raise refuse(f"{where}.{name}" if where else name, "missing", "a table as `--make-rank-table` writes it")
        return item[name]

    listed = field(data, "server_list", "")
    if not isinstance(listed, list) or not listed:
        raise refuse("server_list", "no machines in it", "one entry per machine")
    count = number(field(data, "server_count", ""), "server_count")
    if count != len(listed):
        raise refuse("server_count", f"{count}, but server_list has {len(listed)}", "the number of machines")
    if data.get("status", STATUS) != STATUS:
        raise refuse("status", repr(data["status"]), f"'{STATUS}' (the tool that wrote the table has not finished it)")

    servers, next_rank = [], 0
    for i, item in enumerate(listed):
        where = f"server_list[{i}]"
        entries = field(item, "device", where)
        if not isinstance(entries, list) or not entries:
            raise refuse(f"{where}.device", "no devices in it", "one entry per device")
        devices = []
        for j, entry in enumerate(entries):
            here = f"{where}.device[{j}]"
            rank = number(field(entry, "rank_id", here), f"{here}.rank_id")
            if rank != next_rank:
                raise refuse(f"{here}.rank_id", str(rank), f"{next_rank} (ranks count up through the table, from 0)")
            next_rank += 1
            device = number(field(entry, "device_id", here), f"{here}.device_id")
            devices.append(Device(device, str(entry.get("device_ip", "")), rank))
        if len({device.device for device in devices}) < len(devices):
            raise refuse(f"{where}.device", "a device_id appears twice", "each device once")
        servers.append(Server(str(field(item, "server_id", where)), tuple(devices)))
    addresses = [server.address for server in servers]
    if len(set(addresses)) < len(addresses):
        raise refuse("server_list", "a server_id appears twice", "each machine once")
    return RankTable(tuple(servers))


def dump(table: RankTable) -> str:
    """All numbers are strings: that is the format."""
    servers = [
        {
            "server_id": server.address,
            "device": [
                {"device_id": str(device.device), "device_ip": device.address, "rank_id": str(device.rank)}
                for device in server.devices
            ],
            "host_nic_ip": HOST_NIC,
        }
        for server in table.servers
    ]
    table_fields = {
        "version": VERSION,
        "server_count": str(len(servers)),
        "server_list": servers,
        "status": STATUS,
    }
    return json.dumps(table_fields, indent=4) + "\n"


def make(devices: Sequence[int], server: str, device_addresses: Sequence[str] = ()) -> RankTable:
    """The table of one machine. Where a device has no address of its own, the machine's is written."""
    if device_addresses and len(device_addresses) != len(devices):
        raise UsageError(
            f"--device-ips: {len(device_addresses)} addresses for {len(devices)} devices. Needed: one for each device."
        )
    addresses = dict(zip(devices, device_addresses, strict=True)) if device_addresses else _addresses_of_devices()
    return _numbered([(server, [(device, addresses.get(device, server)) for device in devices])])


def merge(tables: Iterable[RankTable]) -> RankTable:
    """All machines in the order of the tables, ranks counted anew."""
    servers = [server for table in tables for server in table.servers]
    addresses = [server.address for server in servers]
    twice = next((address for address in addresses if addresses.count(address) > 1), None)
    if twice:
        raise UsageError(f"--merge-rank-tables: machine {twice} is in two of the tables. Needed: each machine once.")
    return _numbered([(server.address, [(d.device, d.address) for d in server.devices]) for server in servers])


def default_name(table: RankTable) -> str:
    """Such as hccl_8p_01234567_10.1.2.3.json, and for several machines hccl_2s_16p.json."""
    if len(table.servers) > 1:
        return f"hccl_{len(table.servers)}s_{table.world_size}p.json"
    server = table.servers[0]
    ids = "".join(str(device.device) for device in server.devices)
    return f"hccl_{table.world_size}p_{ids}_{server.address}.json"


def describe(table: RankTable) -> str:
    machines, ranks = len(table.servers), table.world_size
    lines = [f"{machines} machine{'s' * (machines > 1)}, {ranks} rank{'s' * (ranks > 1)}"]
    for number, server in enumerate(table.servers):
        ids = ", ".join(str(device.device) for device in server.devices)
        lines.append(f"node {number}  {server.address}  ranks {span(server.ranks)}  devices {ids}")
    return "\n".join(lines)


def _numbered(servers: Iterable[tuple[str, list[tuple[int, str]]]]) -> RankTable:
    result, rank = [], 0
    for address, devices in servers:
        numbered = tuple(Device(device, own, rank + i) for i, (device, own) in enumerate(devices))
        result.append(Server(address, numbered))
        rank += len(numbered)
    return RankTable(tuple(result))


def _addresses_of_devices() -> dict[int, str]:
    try:
        text = _DEVICE_ADDRESSES.read_text(encoding="utf-8")
    except OSError:
        return {}
    return {int(device): address for device, address in re.findall(r"^address_(\d+)=(\S+)$", text, re.MULTILINE)}
