"""Machines for tests: network namespaces with addresses of their own, joined by a bridge, where this can be had."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from itertools import count

_NUMBERS = count()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def why_not() -> str:
    """Empty where namespaces can be made, else what stands in the way."""
    if os.name != "posix" or not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    name = f"gptw-trial-{os.getpid()}"
    try:
        _ip("netns", "add", name)
        try:
            _ip("netns", "exec", name, "ip", "link", "add", "name", "a", "type", "veth", "peer", "name", "b")
            _ip("netns", "exec", name, "ip", "link", "add", "name", "c", "type", "bridge")
        finally:
            _ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"namespaces cannot be made here ({error.stderr.strip()})"
    return ""


@dataclass(frozen=True)
class Machine:
    address: str
    namespace: str = ""  # empty: this machine, under an address of loopback
    _port: str = ""  # its end at the bridge

    def command(self, words: list[str]) -> list[str]:
        """The same process, there."""
        return ["ip", "netns", "exec", self.namespace, *words] if self.namespace else words

    def set_link(self, state: str) -> None:
        """`down` is a cable that is pulled: nothing is told to anybody."""
        assert self.namespace, "loopback has no cable"
        _ip("netns", "exec", self._switch, "ip", "link", "set", self._port, state)

    @property
    def _switch(self) -> str:
        return self.namespace.rpartition("-")[0] + "-switch"


class Net:
    def __init__(self, num_machines: int) -> None:
        self.prefix = f"gptw-{os.getpid()}-{next(_NUMBERS)}"
        self.switch = f"{self.prefix}-switch"
        self.machines: list[Machine] = []
        _ip("netns", "add", self.switch)
        try:
            self._in(self.switch, "link", "add", "bridge", "type", "bridge")
            self._in(self.switch, "link", "set", "bridge", "up")
            for number in range(num_machines):
                self.machines.append(self._plug(number))
        except BaseException:
            self.close()
            raise

    def _in(self, namespace: str, *words: str) -> None:
        _ip("netns", "exec", namespace, "ip", *words)

    def _plug(self, number: int) -> Machine:
        name, port = f"{self.prefix}-{number}", f"port{number}"
        address = f"10.77.0.{10 - number}"  # so that the order of addresses is not that of the machines
        _ip("netns", "add", name)
        self._in(self.switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        self._in(self.switch, "link", "set", port, "master", "bridge", "up")
        self._in(name, "link", "set", "lo", "up")
        self._in(name, "addr", "add", f"{address}/24", "dev", "eth0")
        self._in(name, "link", "set", "eth0", "up")
        return Machine(address, name, port)

    def close(self) -> None:
        for name in [self.switch, *(machine.namespace for machine in self.machines)]:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
