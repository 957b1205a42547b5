"""What rank 0 writes to stderr reaches the terminal, though torchrun, which starts it, writes to a log."""

import codecs
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from gptworks.launch.failures import GRACE_S


class TerminalPipe:
    """A pipe by whose name rank 0 writes to the stderr of this process; the agent's own stderr is a log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._is_last = False
        self._thread = threading.Thread(target=self._copy, name="stderr", daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        while not self._is_last:  # each rank 0 opens the pipe anew
            decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a piece may end within a character
            with self.path.open("rb", buffering=0) as pipe:
                while piece := pipe.read(65536):
                    sys.stderr.write(decoder.decode(piece))
                    sys.stderr.flush()

    def close(self) -> None:
        """Once the ranks have ended: come back when all that they wrote is shown."""
        deadline = time.monotonic() + GRACE_S
        self._is_last = True
        while self._thread.is_alive() and time.monotonic() < deadline:
            with suppress(OSError):  # wakes it where it waits for another rank 0
                os.close(os.open(self.path, os.O_WRONLY | os.O_NONBLOCK))
            self._thread.join(0.05)
