"""A connection to the store that another process keeps."""

import socket
import threading
from datetime import timedelta
from typing import Any


def knock(address: str, port: int) -> str:
    """Empty: somebody listens there; else why not."""
    try:
        with socket.create_connection((address, port), timeout=5):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def connect(address: str, port: int, answer: float) -> Any:
    """A TCPStore, or RuntimeError. In a thread: torch waits without end for a program that takes a connection and says
    nothing."""
    from torch import distributed

    outcome: list[Any] = []

    def try_it() -> None:
        try:
            limit = timedelta(seconds=answer)
            outcome.append(distributed.TCPStore(address, port, timeout=limit, wait_for_workers=False))
        except RuntimeError as error:
            outcome.append(error)

    thread = threading.Thread(target=try_it, name="connect", daemon=True)
    thread.start()
    thread.join(answer + 1)
    if not outcome:
        raise RuntimeError(f"no answer for {answer:g} s")
    if isinstance(outcome[0], RuntimeError):
        raise outcome[0]
    return outcome[0]
