"""A fault to be found: memory and threads are never given back."""

import threading
import time

_kept = []


def _leak() -> None:
    while True:
        time.sleep(0.5)
        _kept.append(bytearray(b"x" * 1_000_000))
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()


threading.Thread(target=_leak, daemon=True).start()
