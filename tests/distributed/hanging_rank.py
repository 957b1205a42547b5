"""A rank of a run whose group waits longer than parallel.timeout, as NCCL's does: only the heartbeat can end it.

hanging_rank.py ...     as `gptworks train` takes it; rank 1 does not come back from reading the data of step 3
"""

import os
import sys
import time
from typing import Any

from gptworks.cli.main import main
from gptworks.data.loader import Batches
from gptworks.launch import heartbeat, process_group

process_group.WATCHED.add("gloo")
next_step = Batches.next_step


def called(batches: Batches) -> Any:
    if os.environ["RANK"] == "1" and heartbeat._where == "step 3":
        time.sleep(600)
    return next_step(batches)


Batches.next_step = called  # type: ignore[method-assign]
sys.exit(main(sys.argv[1:]))
