"""Which machines have come, said aloud, and the mistakes that would make them wait for each other in vain.

torchrun's rendezvous knows machines by their addresses only and says nothing while it waits. Beside it, in the store
that it keeps on machine 0, what starts torchrun on each machine writes its number and its clock.
"""

import json
import platform
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from gptworks.errors import LostRunError, UsageError, first_line
from gptworks.launch import store_client
from gptworks.launch.nodes import Nodes, bracketed

BEAT_S = 1.0
STALE_S = 5.0  # a machine whose entry has not changed for so long is not there
TELL_S = 5.0  # for which a machine that is about to end waits until the others know
STOPPING = "stopping"  # a machine was told to save and end: all end then
FAILED = "failed"  # a machine ends with a failure, which it says, and after which no other start is to be waited for
LOST_S = 20.0  # after which machine 0, which does not answer, is taken for lost
_YES, _NO = "1", "0"
CLOCK_TOLERANCE_S = 3.0  # torch compares the clocks of machines to find those that are gone


class Membership:
    def __init__(self, nodes: Nodes, say: Callable[[str], None]) -> None:
        self.nodes, self.say = nodes, say
        self.where = f"{bracketed(nodes.master)}:{nodes.port}"
        self.refused = ""  # why the run ends on all machines, before it has begun
        self.present: set[int] = set()
        self.all_done = False
        self.heard: dict[str, str] = {}  # of STOPPING and FAILED: after either no machine starts again
        self._announced: dict[str, tuple[str, float]] = {}  # and when
        self._known: set[str] = set()  # to all that are there
        self._has_begun = self._is_done = self._has_written = False
        self._me, self._beats = uuid.uuid4().hex, 0
        self._heard = time.monotonic()
        self._store: Any = None
        self._end, self._wake = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    # What the watcher asks and tells

    @property
    def is_lost(self) -> bool:
        """Whether machine 0, with the store, has not answered for long."""
        return self._store is not None and time.monotonic() - self._heard > LOST_S

    def does_node_0_answer(self) -> bool:
        return store_client.knock(self.nodes.master, self.nodes.port) == ""

    @property
    def missing(self) -> list[int]:
        return [node for node in range(self.nodes.count) if node not in self.present]

    def begin(self) -> None:
        """Ranks have started, perhaps again: from now on a newcomer's mistake is its own."""
        self._has_begun, self._is_done, self.all_done = True, False, False

    def done(self) -> None:
        """The ranks of this machine have ended well."""
        self._is_done = True

    def tell(self, news: str, text: str = _YES) -> None:
        """Something that ends the ranks of all machines, which are to know why before machine 0, perhaps, takes the
        store with it."""
        self._announced.setdefault(news, (text, time.monotonic()))
        self._wake.set()

    def is_known(self, news: str) -> bool:
        """Whether the others have heard what was told, or have had the time to."""
        has_waited = news in self._announced and time.monotonic() - self._announced[news][1] > TELL_S
        return news in self._known or self._store is None or has_waited

    def _stop(self) -> None:
        self._end.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(2 * BEAT_S)
        self._thread, self._end = None, threading.Event()

    def leave(self) -> None:
        self._stop()
        if self._store is not None and not self.is_lost:
            with suppress(RuntimeError):
                self._store.delete_key(f"node/{self.nodes.rank}")

    def _connect(self) -> Any:
        from torch import distributed

        store = store_client.connect(self.nodes.master, self.nodes.port, 10.0)
        return distributed.PrefixStore("gptworks/machines", store)

    # Machine 0, whose agent keeps the store

    def host(self) -> None:
        """Write to the store as soon as the agent of this machine has opened it."""
        self._stop()
        self._thread = threading.Thread(target=self._host, args=(self._end,), name="membership", daemon=True)
        self._thread.start()

    def _host(self, end: threading.Event) -> None:
        open_since = 0.0
        while not end.wait(0.1):
            reason = store_client.knock(self.nodes.master, self.nodes.port)
            if not reason:
                with suppress(RuntimeError):
                    self._store = self._connect()
                    break
            elif store_client.knock("127.0.0.1", self.nodes.port) == "":
                open_since = open_since or time.monotonic()
                if time.monotonic() - open_since > STALE_S:
                    self.refused = self._no_address_of_mine(reason)
                    return
        self._heard = time.monotonic()
        self._beat(end)

    def _no_address_of_mine(self, reason: str) -> str:
        return (
            f"--master: {self.where} does not lead to this machine ({platform.node()}), which is node 0: the port is "
            f"open here, but not by that address ({reason}). Needed: an address of node 0 that the others reach too."
        )

    # The others, before their agent starts

    def enter(self, idle: Callable[[], None], timeout: float) -> None:
        """Wait for machine 0 and see that both were told the same. `idle`: called meanwhile; what it raises ends it."""
        self._stop()
        self._has_written = False
        self._wait_for_node_0(idle, timeout)
        try:
            self._store = self._connect()
            first = self._changed_entry(0, 60.0, idle)
        except RuntimeError as error:
            raise self._stranger(first_line(error)) from None
        if first is None:
            raise self._stranger("no word from it for 60 s")
        try:
            self._compare(first, idle)
        except RuntimeError as error:
            raise LostRunError(f"{self.where}: node 0 does not answer any more ({first_line(error)}).") from None
        self._heard = time.monotonic()
        self._write_entry()
        self._thread = threading.Thread(target=self._beat, args=(self._end,), name="membership", daemon=True)
        self._thread.start()

    def _stranger(self, reason: str) -> UsageError:
        return UsageError(
            f"--master: what listens at {self.where} is not node 0 of this run ({reason}): another program uses that "
            "port. Needed: a free port, the same on all machines."
        )

    def _wait_for_node_0(self, idle: Callable[[], None], timeout: float) -> None:
        started, next_word = time.monotonic(), 0.0
        while (waited := time.monotonic() - started) < timeout:
            reason = store_client.knock(self.nodes.master, self.nodes.port)
            if not reason:
                return
            if waited >= next_word:
                left = (timeout - waited) / 60
                self.say(f"waiting for node 0 at {self.where} ({reason}); {left:.0f} minutes left")
                next_word = waited + 60
            idle()
            time.sleep(0.2)
        raise (LostRunError if self._has_begun else UsageError)(
            f"{self.where}: node {self.nodes.rank} cannot reach node 0 there ({reason}). Check that the address is "
            "node 0's, that node 0 runs, and that the port is free."
        )

    def _compare(self, first: dict[str, Any], idle: Callable[[], None]) -> None:
        node, mine = self.nodes.rank, self._entry()
        apart = time.time() - first["time"]
        if abs(apart) > CLOCK_TOLERANCE_S:
            self._refuse(
                f"clocks: that of node {node} ({platform.node()}) is {abs(apart):.1f} s "
                f"{'ahead of' if apart > 0 else 'behind'} that of node 0 ({first['host']}). Needed: at most "
                f"{CLOCK_TOLERANCE_S:g} s apart, since machines that are gone are found by their clocks. Start NTP."
            )
        if first["machines"] != mine["machines"]:
            there, here = (":".join(map(str, each["machines"])) for each in (first, mine))
            self._refuse(
                f"--nnodes: {here} on node {node} ({platform.node()}), {there} on node 0 ({first['host']}). "
                "Needed: the same on all machines."
            )
        if self._changed_entry(node, STALE_S, idle) is not None:
            self._refuse(self._taken_message(json.loads(self._store.get(f"node/{node}"))["host"]))

    def _refuse(self, text: str) -> None:
        """On all machines, unless the run goes on already."""
        self._tell_refusal(text)
        raise UsageError(text)

    def _tell_refusal(self, text: str) -> None:
        if not self._store.check(["begun"]):
            self._store.set("refused", text)

    def _changed_entry(self, node: int, seconds: float, idle: Callable[[], None]) -> dict[str, Any] | None:
        """What that machine writes next: an entry that stays as it is was written by one that is gone."""
        deadline, before = time.monotonic() + seconds, None
        while time.monotonic() < deadline:
            if self._store.check([f"node/{node}"]):
                now: dict[str, Any] = json.loads(self._store.get(f"node/{node}"))
                if before is not None and now != before:
                    return now
                before = now
            elif node:
                return None
            idle()
            time.sleep(0.02)
        return None

    # All of them, in a thread: a store that does not answer must not keep a signal waiting

    def _entry(self) -> dict[str, Any]:
        self._beats += 1
        machines = [self.nodes.at_least, self.nodes.count]
        entry = {"me": self._me, "host": platform.node(), "beat": self._beats, "machines": machines}
        return entry | {"time": time.time()}

    def _write_entry(self) -> None:
        key = f"node/{self.nodes.rank}"
        if self._has_written and self._store.check([key]):
            there = json.loads(self._store.get(key))
            if there["me"] != self._me:  # both came at the same moment
                self.refused = self._taken_message(there["host"])
                self._tell_refusal(self.refused)
                return
        self._store.set(key, json.dumps(self._entry()))
        self._has_written = True

    def _taken_message(self, host: str) -> str:
        return (
            f"--node-rank: node {self.nodes.rank} of {self.nodes.count} is taken already, by {host}; this is "
            f"{platform.node()}. Needed: another --node-rank on each machine."
        )

    def _beat(self, end: threading.Event) -> None:
        seen: dict[int, tuple[bytes, float]] = {}
        while self._is_next(end):
            try:
                self._write_entry()
                if self._has_begun:
                    self._store.set("begun", "1")
                # Also where it is not: an earlier start, or an earlier launcher of this number, may have said it was.
                self._store.set(f"done/{self.nodes.rank}", _YES if self._is_done else _NO)
                if self._store.check(["refused"]):
                    self.refused = self._store.get("refused").decode()
                self._look(seen)
                self._tell_and_hear()
                self._heard = time.monotonic()
            except RuntimeError:
                continue  # it may come back; `is_lost` tells for how long it has not

    def _is_next(self, end: threading.Event) -> bool:
        """Waits for the next beat, which comes sooner while something is told that not all have heard."""
        is_told = self._announced.keys() - self._known
        self._wake.wait(BEAT_S / 10 if is_told else BEAT_S if self._beats else 0)
        self._wake.clear()
        return not end.is_set()

    def _tell_and_hear(self) -> None:
        for news in (STOPPING, FAILED):
            if news in self._announced:
                self._store.set(news, self._announced[news][0])
            if news not in self.heard and self._store.check([news]):
                self.heard[news] = self._store.get(news).decode()
                self._store.add(f"know of {news}", 1)
            if news in self.heard and self._store.add(f"know of {news}", 0) >= len(self.present):
                self._known.add(news)

    def _look(self, seen: dict[int, tuple[bytes, float]]) -> None:
        """Machine 0 asks for all the others; these ask machine 0, so that no machine has more to do where there are
        many, but that one."""
        if self.nodes.rank:
            if self._store.check(["present"]):
                self.present = set(json.loads(self._store.get("present")))
            self.all_done = self._is_done and self._is_yes("all done")
            return
        there = [node for node in range(self.nodes.count) if self._store.check([f"node/{node}"])]
        now = time.monotonic()
        for node, text in zip(there, self._store.multi_get([f"node/{node}" for node in there]), strict=True):
            if node not in seen or seen[node][0] != text:
                seen[node] = (text, now)
        self.present = {node for node in there if now - seen[node][1] < STALE_S}
        self._store.set("present", json.dumps(sorted(self.present)))
        self.all_done = self._is_done and all(self._is_yes(f"done/{node}") for node in self.present)
        self._store.set("all done", _YES if self.all_done else _NO)

    def _is_yes(self, key: str) -> bool:
        return self._store.check([key]) and self._store.get(key) == _YES.encode()
