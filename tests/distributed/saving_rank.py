"""A rank of a run that takes its time to save: saving_rank.py MARKER HOW ..., the rest as `gptworks train` takes it.

HOW: seconds before and after the save; stop, which suspends rank 1 in the middle of it; late, for which it takes 5 s.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from gptworks.checkpoint.formats import dcp
from gptworks.cli.main import main

marker, how, *argv = sys.argv[1:]
save = dcp.save


def slowly(*args: Any, **keywords: Any) -> Any:
    Path(marker).touch()
    if how in ("stop", "late"):
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP) if how == "stop" else time.sleep(5)
        return save(*args, **keywords)
    time.sleep(float(how))
    found = save(*args, **keywords)
    time.sleep(float(how))
    return found


dcp.save = slowly
sys.exit(main(argv))
