"""How the launchers of several machines agree: who is there, which ranks each has, and when to start again.

Node 0 keeps a store. A round is one start of all processes: it begins when every node (or, with MIN:MAX, enough of
them) has come, and a node that needs a new start comes to the next round, which the others notice.
"""

import json
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from gptworks.errors import TrainingError, UsageError
from gptworks.launch.nodes import Nodes, free_port

LAST_CALL = 15.0  # seconds for which a round that is large enough waits for the rest


class JobOver(Exception):
    """Another node has ended the run; the message is its reason."""

    def __init__(self, reason: str, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(reason)


@dataclass(frozen=True)
class Round:
    number: int  # from 1
    node: int  # of this machine among those that came
    num_nodes: int
    first_rank: int
    world_size: int
    master: str  # of the processes
    port: int


class Alone:
    """One machine meets nobody."""

    def __init__(self, nproc: int) -> None:
        self.nproc, self.number = nproc, 0

    def next(self, idle: Callable[[], None]) -> Round:
        self.number += 1
        return Round(self.number, 0, 1, 0, self.nproc, "127.0.0.1", free_port())

    def is_called(self) -> bool:
        return False

    def has_failed(self) -> bool:
        return False

    def count_failure(self) -> int:
        return self.number  # nobody can join: only a failure starts a new round

    def all_done(self, idle: Callable[[], None]) -> bool:
        return True

    def end(self, reason: str, exit_code: int) -> None:
        pass


class Meeting:
    def __init__(
        self,
        nodes: Nodes,
        nproc: int,
        say: Callable[[str], None],
        timeout: float = 900.0,
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        """`idle`: called while node 0 is not there; what it raises ends the wait."""
        from torch import distributed

        self.nodes, self.nproc, self.say, self.timeout = nodes, nproc, say, timeout
        self.number = 0
        self.me = uuid.uuid4().hex
        where = f"{nodes.master}:{nodes.port}"
        if nodes.rank:
            self._wait_for_node_0(where, idle)
        try:
            self.store: Any = distributed.TCPStore(
                nodes.master,
                nodes.port,
                is_master=nodes.rank == 0,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            said = str(error).splitlines()[0]
            raise UsageError(
                f"{where}: node {nodes.rank} cannot "
                + ("open the meeting place there" if nodes.rank == 0 else "reach node 0 there")
                + f" ({said}). Check that the address is node 0's, that node 0 runs, and that the port is free."
            ) from None
        self.store.set_timeout(timedelta(seconds=30))

    def _wait_for_node_0(self, where: str, idle: Callable[[], None]) -> None:
        """Aloud: torch would knock for as long and say nothing that a user can use."""
        started, told = time.monotonic(), 0.0
        while (waited := time.monotonic() - started) < self.timeout:
            try:
                with socket.create_connection((self.nodes.master, self.nodes.port), timeout=5):
                    return
            except OSError as error:
                reason = error.strerror or str(error)
            if waited >= told:
                left = (self.timeout - waited) / 60
                self.say(f"waiting for node 0 at {where} ({reason}); {left:.0f} minutes left")
                told = waited + 60
            idle()
            time.sleep(0.5)
        raise UsageError(
            f"{where}: node {self.nodes.rank} cannot reach node 0 there ({reason}). Check that the address is node "
            "0's, that node 0 runs, and that the port is free."
        )

    def next(self, idle: Callable[[], None]) -> Round:
        """Wait for the others. `idle` is called meanwhile; what it raises ends the wait."""
        while True:
            done = int(self.store.get("done")) if self.store.check(["done"]) else 0
            self.number = max(self.number, done) + 1
            key, node = f"round/{self.number}", self.nodes.rank
            mine = json.dumps({"node": node, "nproc": self.nproc, "me": self.me})
            there = self.store.compare_set(f"{key}/node/{node}", "", mine).decode()
            if json.loads(there)["me"] != self.me:
                raise UsageError(
                    f"--node-rank: node {node} of {self.nodes.count} has come already. "
                    "Needed: another --node-rank on each machine."
                )
            self.store.set(f"{key}/called", "1")
            if node == 0:
                self._gather(key, idle)
            self._wait_for(f"{key}/members", idle)
            round = json.loads(self.store.get(f"{key}/members"))
            before = 0
            for place, member in enumerate(round["members"]):
                if member["me"] == self.me:
                    return Round(
                        self.number,
                        place,
                        len(round["members"]),
                        before,
                        sum(one["nproc"] for one in round["members"]),
                        self.nodes.master,
                        round["port"],
                    )
                before += member["nproc"]
            # It began without this node: ask for another one.

    def _gather(self, key: str, idle: Callable[[], None]) -> None:
        started, told = time.monotonic(), False
        while True:
            here = [k for k in range(self.nodes.count) if self.store.check([f"{key}/node/{k}"])]
            waited = time.monotonic() - started
            if len(here) == self.nodes.count or (len(here) >= self.nodes.at_least and waited > LAST_CALL):
                break
            missing = ", ".join(str(k) for k in range(self.nodes.count) if k not in here)
            if waited > self.timeout:
                raise TrainingError(
                    f"node {missing} of {self.nodes.count} has not come to {self.nodes.master}:{self.nodes.port} "
                    f"within {self.timeout:g} s. Start the command there too, and check that it reaches this address."
                )
            if waited > 2 and not told:
                self.say(f"waiting for node {missing} at {self.nodes.master}:{self.nodes.port}")
                told = True
            idle()
            time.sleep(0.1)
        members = [json.loads(self.store.get(f"{key}/node/{k}")) for k in here]
        self.store.set(f"{key}/members", json.dumps({"members": members, "port": free_port()}))
        self.store.set("done", str(self.number))

    def _wait_for(self, key: str, idle: Callable[[], None]) -> None:
        deadline = time.monotonic() + self.timeout + 30
        while not self.store.check([key]):
            self._leave_if_over()
            if time.monotonic() > deadline:
                raise TrainingError(f"node 0 at {self.nodes.master}:{self.nodes.port} has not begun the run.")
            idle()
            time.sleep(0.1)

    def is_called(self) -> bool:
        """Whether somebody waits for all to start again."""
        self._leave_if_over()
        return bool(self.store.check([f"round/{self.number + 1}/called"]))

    def has_failed(self) -> bool:
        """Whether a node has seen a rank of this round fail, or was lost with its ranks and has been replaced."""
        if self.store.check([f"round/{self.number}/failed"]):
            return True
        members = json.loads(self.store.get(f"round/{self.number}/members"))["members"]
        next_time = {f"round/{self.number + 1}/node/{member['node']}": member["me"] for member in members}
        return any(
            self.store.check([key]) and json.loads(self.store.get(key))["me"] != me for key, me in next_time.items()
        )

    def count_failure(self) -> int:
        """A rank of this round failed. How many rounds have: one counts once, however many nodes see it, and one that
        ended because a node joined does not."""
        self.store.set(f"round/{self.number}/failed", "1")
        return sum(self.store.check([f"round/{number}/failed"]) for number in range(1, self.number + 1))

    def all_done(self, idle: Callable[[], None]) -> bool:
        """This node's processes have ended well. False: another node needs a new start."""
        key = f"round/{self.number}"
        try:
            self.store.add(f"{key}/ended", 1)
            members = len(json.loads(self.store.get(f"{key}/members"))["members"])
            while int(self.store.get(f"{key}/ended")) < members:
                if self.is_called():
                    return False
                idle()
                time.sleep(0.2)
        except RuntimeError:
            if self.nodes.rank == 0:
                raise
        return True  # node 0 has ended, and its store with it

    def end(self, reason: str, exit_code: int) -> None:
        """The run is over for all nodes."""
        with suppress(RuntimeError):
            self.store.compare_set("over", "", json.dumps([reason, exit_code]))
            deadline = time.monotonic() + 3
            while self.nodes.rank == 0 and time.monotonic() < deadline:  # the others read it here
                if self.store.add("told", 0) >= self.nodes.count - 1:
                    break
                time.sleep(0.1)

    def _leave_if_over(self) -> None:
        if self.store.check(["over"]):
            reason, exit_code = json.loads(self.store.get("over"))
            self.store.add("told", 1)
            raise JobOver(reason, exit_code)
