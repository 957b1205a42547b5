"""Several machines: starts torchrun on this one, shows what its ranks say, and tells how the run ended.

The rendezvous, the ranks' processes and their restarts are torch's. What went wrong is taken from what the ranks wrote:
torchrun's own account, which is in its log, is shown only when nobody wrote anything.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from gptworks.errors import TRY_AGAIN, UsageError
from gptworks.launch import failures, nodes, open_files, rank_env, torchrun
from gptworks.launch.failures import GRACE_S, Failure, say
from gptworks.launch.job import Job, make_log_dir
from gptworks.launch.membership import FAILED, STOPPING, TELL_S, Membership
from gptworks.launch.rank_process import (
    BEGUN,
    ENDED_WELL,
    SAVES,
    STOPPED,
    end_with_parent,
    last_lines,
    log_file,
    unspoken_failure,
)
from gptworks.launch.signals import Interrupted, Received
from gptworks.launch.terminal_pipe import TerminalPipe

REJOIN_S = 120  # for which a machine that has lost machine 0 waits for it to come back
_POLL_S = 0.1
_UNSEEN_S = 1.0  # for which torchrun may not have seen that a rank has died: it writes down only the first that it sees
_EXIT_CODE = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")  # of torchrun's log


def run(job: Job) -> int:
    """The exit code of the run, as this machine knows it."""
    make_log_dir(job.log_dir)
    open_files.raise_limit()  # the ranks inherit it
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what a store says of machines that have gone
    with Received() as received, tempfile.TemporaryDirectory(prefix="gptworks-") as folder:
        member = Membership(job.nodes, say)
        machine = _Machine(job, member, received, Path(folder))
        try:
            return machine.run()
        except Interrupted:
            return 128 + received.received[0]
        finally:
            machine.end_agent()
            machine.stderr.close()
            member.leave()


@dataclass
class _Round:
    """One start of all ranks: what those of this machine have written."""

    folder: Path
    dead: dict[int, float] = field(default_factory=dict)  # ranks that are gone without a word, and since when
    unexplained: dict[int, float] = field(default_factory=dict)  # those that have got one, without a cause, and when

    def begun(self) -> dict[int, dict[str, int]]:
        return {int(path.name[len(BEGUN) :]): json.loads(path.read_text()) for path in self.folder.glob(f"{BEGUN}*")}

    def ended(self) -> set[int]:
        return {int(path.name[len(ENDED_WELL) :]) for path in self.folder.glob(f"{ENDED_WELL}*")}

    def spoken(self) -> set[int]:
        """Ranks that have said how they ended."""
        return self.ended() | failures.read_all(self.folder).keys()

    def note_deaths(self, job: Job, exit_codes: Callable[[], dict[int, int]]) -> None:
        """A rank that ended without a word of its own gets one, which the others may be waiting for; and another one
        when torchrun has written down how it ended, which it does after it has ended the others."""
        begun, now = self.begun(), time.monotonic()
        for rank in begun.keys() - self.spoken():
            if _is_alive(begun[rank]["pid"]) or rank in self.spoken():  # it may have spoken between the questions
                continue
            has_waited = now - self.dead.setdefault(rank, now) > _UNSEEN_S
            if not has_waited and begun[rank]["pid"] not in exit_codes():
                continue  # at a word of ours the others would end too, perhaps before torchrun has seen who was first
            text = "killed, or it crashed: it left no word. If nobody did that, memory ran out (dmesg tells)."
            Failure(rank, f"{text} Its log: {log_file(job.log_dir, rank)}").write(self.folder)
            self.unexplained[rank] = now
        codes = exit_codes() if self.unexplained else {}
        for rank in [rank for rank in self.unexplained if codes.get(begun[rank]["pid"])]:
            known = unspoken_failure(rank, codes[begun[rank]["pid"]], log_file(job.log_dir, rank))
            replace(known, time=failures.read_all(self.folder)[rank].time).write(self.folder)
            del self.unexplained[rank]

    def is_over(self, nproc: int) -> bool:
        """Whether every rank of this machine has begun, has spoken its last word, and is gone."""
        begun = self.begun()
        if any(time.monotonic() - since < GRACE_S for since in self.unexplained.values()):
            return False  # torchrun will tell how it ended
        return len(self.spoken()) == len(begun) == nproc and not any(_is_alive(rank["pid"]) for rank in begun.values())

    def ended_well(self, nproc: int) -> bool:
        return len(self.ended()) == nproc

    @property
    def saves(self) -> bool:
        """Whether a rank has come so far that it saves when a signal ends it."""
        return any(self.folder.glob(f"{SAVES}*"))

    @property
    def was_stopped(self) -> bool:
        return (self.folder / STOPPED).exists()

    def cause(self) -> Failure:
        """Why a start has failed, in the words of the rank itself."""
        cause = failures.first(failures.read_all(self.folder))
        assert cause is not None
        return cause

    def failure(self) -> Failure | None:
        known, begun = failures.read_all(self.folder), self.begun()
        return failures.named(known, next(iter(begun.values()))["world_size"]) if known and begun else None


class _Machine:
    def __init__(self, job: Job, member: Membership, received: Received, folder: Path) -> None:
        self.job, self.member, self.received, self.folder = job, member, received, folder
        self.agent: subprocess.Popen[bytes] | None = None
        self.stderr = TerminalPipe(folder / "stderr")
        log = torchrun.log_file(job)
        self._log_start = log.stat().st_size if log.exists() else 0  # after what earlier runs have left
        self.rounds: list[_Round] = []
        self.waiting_since = time.monotonic()
        self._next_word = 5.0
        self._restarts_told = 0
        self._to_pass_on = 0  # a signal's number
        self._has_shown = self._is_complete = self._has_passed_on = False

    def run(self) -> int:
        for attempt in range(self.job.max_restarts + 1):
            self._start_agent(is_first=attempt == 0)
            self._watch()
            if attempt == self.job.max_restarts or not self._gave_up():
                break
            say(f"torchrun ended on this machine; starting it again ({attempt + 1} of {self.job.max_restarts})")
        return self._verdict()

    def _gave_up(self) -> bool:
        """Whether the agent has ended though it might have started the ranks again: it was killed, or it has lost the
        machine that keeps the rendezvous."""
        assert self.agent is not None
        if self._stop_signal() or self.member.refused or self._ended_well() or self.agent.returncode == 0:
            return False
        if FAILED in self.member.heard:
            return False
        if self.rounds:
            self._wait_for_last_words()
        failure = self.rounds[-1].failure() if self.rounds else None
        was_in_vain = time.monotonic() - self.waiting_since >= torchrun.JOIN_TIMEOUT_S
        return not was_in_vain and (failure is None or not self._is_present_failure(failure))

    # Starting

    def _start_agent(self, *, is_first: bool) -> None:
        job = self.job
        if job.nodes.rank:
            self.member.enter(self.received.leave_if_received, torchrun.JOIN_TIMEOUT_S if is_first else REJOIN_S)
        elif is_first:
            nodes.wait_until_known(job.nodes.master, say, self.received.leave_if_received)
            nodes.require_free(job.nodes.master, job.nodes.port)
        environment = torchrun.environment(job) | {rank_env.ROUNDS: str(self.folder)}
        environment[rank_env.TERMINAL] = str(self.stderr.path)
        if not job.quiet:
            print(f"node {job.nodes.rank} of {job.nodes.count}: {torchrun.described(job)}", flush=True)
        with torchrun.log_file(job).open("ab") as log:
            self.agent = subprocess.Popen(
                torchrun.command(job),
                env=torchrun.inherited() | environment,
                stdin=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,  # a terminal's Ctrl-C comes here only, and is passed on once
                preexec_fn=end_with_parent if sys.platform == "linux" else None,
            )
        if not job.nodes.rank:
            self.member.host()
        self.waiting_since = time.monotonic()

    # Watching

    def _watch(self) -> None:
        """Until the agent has ended, by itself or because there is nothing left to wait for."""
        assert self.agent is not None
        is_over_since: float | None = None
        while self.agent.poll() is None:
            self._pass_on_signals()
            self._look_at_rounds()
            if self.member.refused:
                self._let_others_hear()
                self.end_agent()
                raise UsageError(self.member.refused)
            present = self.rounds[-1] if self.rounds else None
            if present is None or not present.is_over(self.job.nproc):
                is_over_since = None
                self._say_who_is_missing(is_waiting=present is None)
            else:
                is_over_since = is_over_since or time.monotonic()
                if self._has_nothing_left(present, time.monotonic() - is_over_since):
                    self.end_agent()
                    return
                self._say_who_is_missing(is_waiting=not present.ended_well(self.job.nproc))
            time.sleep(_POLL_S)
        self._look_at_rounds()

    def _let_others_hear(self) -> None:
        """Machine 0 takes the store with it, from which the others read why the run is refused."""
        deadline = time.monotonic() + (0 if self.job.nodes.rank else TELL_S)
        while time.monotonic() < deadline and not self.received.ends_at_once:
            time.sleep(_POLL_S)

    def _has_nothing_left(self, present: _Round, seconds: float) -> bool:
        """The ranks of this machine have ended so long ago, and the agent goes on."""
        if present.ended_well(self.job.nproc):
            self.member.done()
            self._is_complete = self.member.all_done and seconds > 5  # the agent waits for one that was told to end
            return self._is_complete
        failure = present.failure()
        if failure is not None and not failure.can_restart:
            if self.job.nodes.rank == 0:
                self.member.tell(FAILED, present.cause().dump())
            # torchrun would start them again, to find the same.
            return seconds > 0.5 and (self.job.nodes.rank > 0 or self.member.is_known(FAILED))
        return FAILED in self.member.heard or (self.member.is_lost and self.job.nodes.rank > 0)

    def _pass_on_signals(self) -> None:
        for number in self.received.not_passed_on():
            if self.received.ends_at_once:
                self._end_at_once()
            else:
                self.member.tell(STOPPING, str(number))
                if self.rounds and not self._to_pass_on:  # rank 0, which says the rest, may be on another machine
                    say(f"{signal.Signals(number).name}: the ranks of all machines finish the step, save and end")
                self._to_pass_on = self._to_pass_on or number
        # Ranks that train hear of it from each other. Those that still wait for the others, who have ended, do not.
        self._to_pass_on = self._to_pass_on or self._stop_signal()
        if self._to_pass_on and not self._has_passed_on and self.member.is_known(STOPPING):
            assert self.agent is not None
            self._has_passed_on = True  # at the third, the agent ends itself, and its ranks in the middle of a save
            self.agent.send_signal(self._to_pass_on)

    def _stop_signal(self) -> int:
        """The signal's number, to whichever machine it came; 0: none has."""
        return next(iter(self.received.received), int(self.member.heard.get(STOPPING, "0")))

    def _end_at_once(self) -> None:
        text = (
            f"stopped because node {self.job.nodes.rank} was ended at once by a second Ctrl-C; it may not have saved."
        )
        self.member.tell(FAILED, Failure(0, text, because_of=-1).dump())
        while not self.member.is_known(FAILED):  # else the others would take what they have seen for a good end
            time.sleep(_POLL_S)
        for rank in self.rounds[-1].begun().values() if self.rounds else ():
            if _is_alive(rank["pid"]):
                os.kill(rank["pid"], signal.SIGINT)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and self.agent is not None and self.agent.poll() is None:
            time.sleep(_POLL_S)
        self.end_agent()

    def _look_at_rounds(self) -> None:
        for path in sorted(self._new_rounds(), key=lambda path: path.stat().st_mtime):
            if self.rounds:  # torchrun has written down how its ranks ended before it started these
                self.rounds[-1].note_deaths(self.job, self._exit_codes)
            self._say_why_again()
            self.rounds.append(_Round(path))
            self._has_shown = False
        if not self.rounds:
            return
        present = self.rounds[-1]
        present.note_deaths(self.job, self._exit_codes)
        begun = present.begun()
        if not self._has_shown and len(begun) == self.job.nproc:
            self._has_shown = True
            self.member.begin()
            self._show(begun)
        if present.is_over(self.job.nproc):
            self._say_why_again()

    def _show(self, begun: dict[int, dict[str, int]]) -> None:
        """The ranks as torch has given them, which is what counts."""
        first = begun[min(begun)]
        processes = f"{self.job.nproc} process{'es' if self.job.nproc > 1 else ''}"
        text = f"node {first['node']} of {first['num_nodes']}: {processes}, ranks {min(begun)} to {max(begun)}"
        if not self.job.quiet:
            print(f"{text} of {first['world_size']}; logs in {self.job.log_dir}", flush=True)

    def _say_why_again(self) -> None:
        """Say once of a start that is over why there is or will be another."""
        if self._restarts_told == len(self.rounds):
            return
        present, failure = self.rounds[-1], self.rounds[-1].failure()
        if failure is None:
            if self._stop_signal() or not present.ended():
                return
            # All have saved and ended, and yet there is another start: the agent has asked them to.
            if present.ended_well(self.job.nproc) and not self._new_rounds():
                return
            say("another node joins; so all start again.")
        elif failure.can_restart and self._number(present) < self.job.max_restarts and not self._stop_signal():
            again = f"({self._number(present) + 1} of {self.job.max_restarts})"
            say(f"{failure.message}\nstarting again from the last checkpoint {again}")
        self._restarts_told = len(self.rounds)

    def _new_rounds(self) -> list[Path]:
        known = {each.folder for each in self.rounds}
        return [path for path in self.folder.iterdir() if path.is_dir() and path not in known]

    def _number(self, present: _Round) -> int:
        return max((rank["restarts"] for rank in present.begun().values()), default=0)

    def _say_who_is_missing(self, *, is_waiting: bool) -> None:
        if not is_waiting:
            self.waiting_since, self._next_word = time.monotonic(), 5.0
            return
        waited = time.monotonic() - self.waiting_since
        if waited > self._next_word and self.member.missing and self.member.present:
            self._next_word = waited + 60
            say(f"waiting for {self._missing()} at {self.member.where}")

    def _missing(self) -> str:
        addresses = self.job.nodes.addresses
        named = [f"{node} ({addresses[node]})" if addresses else str(node) for node in self.member.missing]
        return "node " + ", ".join(named)

    # The end

    def end_agent(self) -> None:
        """Ends the agent, and with it the ranks of this machine."""
        if self.agent is None or self.agent.poll() is not None:
            return
        self.agent.send_signal(signal.SIGTERM)
        try:
            self.agent.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.agent.kill()
            self.agent.wait()

    def _ended_well(self) -> bool:
        """Not where the agent has ended its ranks for the sake of another start, and has then failed."""
        assert self.agent is not None
        was_meant = self.agent.returncode == 0 or self._is_complete or bool(self._stop_signal())
        was_meant = was_meant and FAILED not in self.member.heard
        return was_meant and bool(self.rounds) and self.rounds[-1].ended_well(self.job.nproc)

    def _verdict(self) -> int:
        assert self.agent is not None
        self.stderr.close()
        if self.received.ends_at_once:
            return 128 + signal.SIGINT
        if self._ended_well():
            # The same on all machines, of which only one may have got the signal.
            return (self.job.stopped_code or 0) if self.rounds[-1].was_stopped else 0
        failure, stop = self._last_failure(), self._stop_signal()
        has_begun = bool(self.rounds) and self.rounds[-1].saves
        if stop and not has_begun and (failure is None or failure.can_restart):
            say(f"{signal.Signals(stop).name}: stopped before a step was done; there was nothing to save")
            return 128 + stop
        if failure is not None:
            return failures.say_failure(failure)
        if stop:
            return 128 + stop
        if self.member.refused:
            raise UsageError(self.member.refused)
        if self.job.nodes.rank and (self.member.is_lost or not self.member.does_node_0_answer()):
            say(f"error: node 0 at {self.member.where} does not answer any more; stopped here too.")
            return TRY_AGAIN
        if self.member.missing and self.member.present and self.job.nodes.at_least > len(self.member.present):
            say(
                f"error: {self._missing()} of {self.job.nodes.count} has not reached {self.member.where} within "
                f"{torchrun.JOIN_TIMEOUT_S:g} s. Start the command there too, and check that it reaches this address."
            )
            return TRY_AGAIN if self.rounds else 2  # one that was there and went may come back
        log = torchrun.log_file(self.job)
        say("\n".join([f"error: torchrun ended with exit code {self.agent.returncode}; {log}:", *last_lines(log)]))
        return 1

    def _last_failure(self) -> Failure | None:
        """What this machine ends with, where a rank of it has said so, or machine 0 has."""
        if self.rounds:
            self._wait_for_last_words()
        failure = self.rounds[-1].failure() if self.rounds else None
        if failure is not None and not failure.can_restart:
            return failure
        if FAILED in self.member.heard:
            cause = failures.read(self.member.heard[FAILED])
            return failures.because_of_another(failure.rank if failure else cause.rank, cause)
        is_last = failure is not None and (self._is_present_failure(failure) or not self.member.missing)
        return failure if is_last else None

    def _is_present_failure(self, failure: Failure) -> bool:
        """Not one after which the agent waited in vain for other machines."""
        return not failure.can_restart or self._number(self.rounds[-1]) >= self.job.max_restarts

    def _exit_codes(self) -> dict[int, int]:
        """The exit codes of processes that torchrun has seen end badly, by their numbers."""
        with torchrun.log_file(self.job).open("rb") as log:
            log.seek(self._log_start)
            codes = _EXIT_CODE.findall(log.read().decode(errors="replace"))
        return {int(pid): int(code) for code, pid in codes}

    def _wait_for_last_words(self) -> None:
        """The agent has gone, and its ranks with it or before it."""
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and not self.rounds[-1].is_over(self.job.nproc):
            self.rounds[-1].note_deaths(self.job, self._exit_codes)
            time.sleep(_POLL_S)


def _is_alive(pid: int) -> bool:
    try:
        if sys.platform == "linux":
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        os.kill(pid, 0)
    except (OSError, IndexError):
        return False
    return True
