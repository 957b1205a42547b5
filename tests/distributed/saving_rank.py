"""A rank of a run that takes its time to save: saving_rank.py MARKER ..., the rest as `gptworks train` takes it."""

import sys
import time
from pathlib import Path
from typing import Any

from gptworks.checkpoint.formats import dcp
from gptworks.cli.main import main

marker, *argv = sys.argv[1:]
save = dcp.save


def slowly(*args: Any, **keywords: Any) -> Any:
    Path(marker).touch()
    time.sleep(1)
    found = save(*args, **keywords)
    time.sleep(1)
    return found


dcp.save = slowly
sys.exit(main(argv))
