"""The machines of a run: how many, which one this is, and where they meet."""

import ipaddress
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptworks.errors import UsageError
from gptworks.launch import rank_table

PORT = 29400
# Machine 0 waits so long until its name is known: that of a pod is, some seconds after the pod has begun.
KNOWN_S = 60
_SIOCGIFADDR = 0x8915  # sockios.h of Linux


@dataclass(frozen=True)
class Nodes:
    count: int = 1  # at most
    at_least: int = 1  # with fewer than `count` the run goes on, as long as there are so many
    rank: int = 0  # of this machine
    master: str = "127.0.0.1"  # node 0
    port: int = PORT
    devices: tuple[int, ...] = ()  # of this machine, one for each process; empty = as they come
    nproc: tuple[int, ...] = ()  # processes of each machine, where a rank table says so
    addresses: tuple[str, ...] = ()  # of all machines, where they are given


def solve(
    *,
    nnodes: str = "",
    node_rank: int | None = None,
    master: str = "",
    node_ips: str = "",
    table: str = "",
    ranks: str = "",
) -> Nodes:
    """From the options of the command line. At most one way of naming the machines."""
    ways = [name for name, value in (("--nnodes", nnodes), ("--node-ips", node_ips), ("--rank-table", table)) if value]
    if len(ways) > 1:
        raise UsageError(f"{' and '.join(ways)}: each says which machines there are. Give one of them.")
    if ranks and not table:
        raise UsageError("--rank-range: ranks of a rank table, and there is none. Give --rank-table too.")
    if not ways:
        lonely = [name for name, value in (("--node-rank", node_rank is not None), ("--master", master)) if value]
        if lonely:
            raise UsageError(f"{lonely[0]}: of how many machines? Give --nnodes or --node-ips too.")
        return Nodes()
    if master:
        _require_addresses([master], "--master")
    if table:
        return _of_table(Path(table), ranks, node_rank, master)
    if node_ips:
        addresses = [address.strip() for address in node_ips.split(",") if address.strip()]
        if len(set(addresses)) < len(addresses) or not addresses:
            raise UsageError(f"--node-ips: {node_ips!r}. Needed: the address of each machine once, such as a,b.")
        _require_addresses(addresses, "--node-ips")
        rank = _which_is_mine(addresses, node_rank, "--node-ips")
        address, port = _endpoint(master or addresses[0])
        return Nodes(len(addresses), len(addresses), rank, address, port, addresses=tuple(addresses))
    return _of_count(nnodes, node_rank, master)


def _of_count(nnodes: str, node_rank: int | None, master: str) -> Nodes:
    low, _, high = nnodes.partition(":")
    if not low.isdecimal() or (high and not high.isdecimal()) or not 1 <= int(low) <= int(high or low):
        raise UsageError(f"--nnodes: {nnodes!r}. Needed: a number of machines, or MIN:MAX such as 1:2.")
    count, at_least = int(high or low), int(low)
    if count == 1:
        return Nodes()
    if not master:
        raise UsageError(f"--nnodes {nnodes}: needs --master ADDRESS[:PORT], the machine with --node-rank 0.")
    address, port = _endpoint(master)
    if node_rank is None:
        raise UsageError(f"--nnodes {nnodes}: needs --node-rank, from 0 to {count - 1}, another one on each machine.")
    _check_rank(node_rank, count)
    return Nodes(count, at_least, node_rank, address, port)


def _of_table(path: Path, ranks: str, node_rank: int | None, master: str) -> Nodes:
    table = rank_table.read(path)
    addresses, count = tuple(server.address for server in table.servers), len(table.servers)
    _require_addresses(addresses, str(path))
    if ranks:
        rank = table.server_of(rank_table.parse_range(ranks, "--rank-range"))
        if node_rank not in (None, rank):
            raise UsageError(f"--node-rank: {node_rank}, but --rank-range {ranks} is node {rank} of {path}. Give one.")
    elif count == 1:
        rank = 0
    else:
        rank = _which_is_mine(addresses, node_rank, str(path))
    address, port = _endpoint(master or table.servers[0].address)
    return Nodes(
        count,
        count,
        rank,
        address if count > 1 else Nodes.master,
        port,
        tuple(device.device for device in table.servers[rank].devices),
        tuple(len(server.devices) for server in table.servers),
        addresses,
    )


def require_local_ranks(path: Path, ranks: str) -> None:
    """Before it waits for the others in vain: ranks of a rank table that are not those of this machine."""
    table = rank_table.read(path)
    rank = table.server_of(rank_table.parse_range(ranks, "--rank-range"))
    mine = [server for server in table.servers if is_mine(_endpoint(server.address)[0])]
    if len(table.servers) == 1 or table.servers[rank] in mine:
        return
    ours = (
        f"This one is {mine[0].address}, with {rank_table.span(mine[0].ranks)}."
        if mine
        else f"None of its addresses ({', '.join(server.address for server in table.servers)}) is this machine's."
    )
    raise UsageError(
        f"--rank-range: {ranks} of {path} is {table.servers[rank].address}, which is not this machine. {ours} If it "
        f"is this machine all the same, under another address, say so: `gptworks ... --node-rank {rank}`."
    )


def _endpoint(text: str, source: str = "--master") -> tuple[str, int]:
    """ADDRESS, ADDRESS:PORT, [IPV6]:PORT"""
    address, colon, port = text.rpartition(":")
    if not colon or (text.count(":") > 1 and not text.startswith("[")):
        return text, PORT
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"{source}: {text!r}. Needed: ADDRESS or ADDRESS:PORT, such as 10.0.0.1:{PORT}.")
    return address.strip("[]"), int(port)


def _require_addresses(texts: Sequence[str], source: str) -> None:
    """What can be no machine's, such as 10.0.0.300, is not waited for."""
    for text in texts:
        address = _endpoint(text, source)[0]
        try:
            if re.fullmatch(r"[\d.]+|.*:.*", address):
                ipaddress.ip_address(address)
            elif not re.fullmatch(r"[\w.-]+", address) or not address.encode("idna"):
                raise ValueError
        except ValueError:  # a UnicodeError is one
            raise UsageError(
                f"{source}: {text!r} is not an address. Needed: such as 10.0.0.1, or a machine's name."
            ) from None


def _which_is_mine(addresses: Sequence[str], node_rank: int | None, source: str) -> int:
    if node_rank is not None:
        _check_rank(node_rank, len(addresses))
        return node_rank
    mine = [number for number, address in enumerate(addresses) if is_mine(address)]
    if len(mine) == 1:
        return mine[0]
    names = " and ".join(addresses[number] for number in mine) or "none"
    raise UsageError(
        f"{source}: {', '.join(addresses)}: {names} of them {'are' if mine else 'is'} this machine. "
        "Needed: one. Say which one it is: `gptworks ... --node-rank N`."
    )


def is_mine(address: str) -> bool:
    """A socket can be bound to the addresses of this machine only."""
    try:
        candidates = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, where in candidates:
        try:
            with socket.socket(family, kind, protocol) as trial:
                trial.bind((where[0], 0))
                return True
        except OSError:
            continue
    return False


def _check_rank(rank: int, count: int) -> None:
    if not 0 <= rank < count:
        raise UsageError(f"--node-rank: {rank} of {count} machines. Needed: 0 to {count - 1}.")


def bracketed(address: str) -> str:
    """As it stands before a colon and a port."""
    return f"[{address}]" if ":" in address else address


def wait_until_known(master: str, say: Callable[[str], None], idle: Callable[[], None]) -> None:
    """On machine 0. `idle`: called meanwhile; what it raises ends it."""
    started, has_said = time.monotonic(), False
    while True:
        try:
            socket.getaddrinfo(master, None)
            return
        except socket.gaierror as error:
            reason = error.strerror
        if time.monotonic() - started >= KNOWN_S:
            raise UsageError(
                f"--master: {master}: the address is not known here ({reason}). Needed: an address of machine 0."
            )
        if not has_said:
            say(f"waiting at most {KNOWN_S:g} s until the name {master} is known here ({reason})")
            has_said = True
        idle()
        time.sleep(0.2)


def require_free(master: str, port: int) -> None:
    """On machine 0, before it opens that port."""
    where = f"{bracketed(master)}:{port}"
    try:
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(("", port))
        with socket.create_connection((master, port), timeout=2):
            pass
    except ConnectionError:
        return  # nobody is there, as it should be
    except TimeoutError:
        return  # the same, behind a firewall
    except OSError as error:
        raise UsageError(
            f"--master: {where}: port {port} of this machine cannot be used ({error.strerror}): another program or "
            "another run has it. Needed: a free port, the same on all machines, such as --master ADDRESS:PORT."
        ) from None
    raise UsageError(
        f"--master: something listens at {where} already: another run, or another machine that was started with "
        "--node-rank 0. Needed: a free port, and each number once."
    )


_ELSEWHERE = ("192.0.2.1", 9)  # an address of documentation (RFC 5737): any that is not of this machine


def _source_towards(family: int, kind: int, there: Any) -> str:
    with socket.socket(family, kind) as trial:
        trial.connect(there)  # sends nothing
        return str(trial.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "localhost")


def interface_towards(master: str, port: int) -> str:
    """The network interface by which this machine reaches that address, as the system names it; empty: not known."""
    try:
        import fcntl
    except ImportError:  # Windows
        return ""
    try:
        family, kind, _, _, there = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)[0]
        mine = _source_towards(family, kind, there)
        if _is_loopback(mine) and not _is_loopback(master):
            # Debian gives a machine's own name a loopback address, by which no other machine reaches it.
            mine = _source_towards(socket.AF_INET, socket.SOCK_DGRAM, _ELSEWHERE)
    except OSError:
        return ""
    if _is_loopback(mine):
        return "lo" if sys.platform == "linux" else "lo0"
    for _, name in socket.if_nameindex():
        with suppress(OSError), socket.socket() as trial:
            request = struct.pack("256s", name.encode())
            address = fcntl.ioctl(trial.fileno(), _SIOCGIFADDR, request)[20:24]
            if socket.inet_ntoa(address) == mine:
                return name
    return ""


def num_cores() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class HeldPort:
    """A port that the system gives to no other program by chance for as long as this is open, though whoever is told
    its number can listen there: Linux lets that be if both have set SO_REUSEADDR, as torch does."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("", 0))
        self.number = int(self._socket.getsockname()[1])
        if sys.platform != "linux":  # where nobody could listen there meanwhile
            self.close()

    def close(self) -> None:
        self._socket.close()
