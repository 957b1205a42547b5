"""The command line on a machine whose products kill the process, as a program.

    python deadly_machine.py < jobs.json > outcomes.json

Such a machine is rare, so the products that are tried in children are replaced: they kill themselves unless oneDNN is
capped at its lowest instruction set, which every machine of the tests has something above. What oneDNN really uses in
the end therefore tells whether anything was multiplied before the cap was set. Each job is a process of its own,
copied from this one, which has imported torch and multiplied nothing.
"""

import contextlib
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo  # imported once for all
import torch.export
import torch.utils.tensorboard

import gptworks.doctor.machine
import gptworks.export
import gptworks.train.run
import gptworks.verify.layout  # noqa: F401
from gptworks import child_process, cpu
from gptworks.cli.main import main

LOWEST = "SSE41"


def work(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """job: argv of the command line, or Python code; the types whose products kill; the caps that cure it."""

    def multiply(dtype: torch.dtype) -> None:
        now = os.environ.get(cpu.CAP, "") if torch._C._get_mkldnn_enabled() else "off"
        if str(dtype).removeprefix("torch.") in job["kills"] and now not in job["unless"]:
            os.kill(os.getpid(), signal.SIGILL)

    cpu.multiply, cpu._CAPS = multiply, (LOWEST,)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = exec(job["code"], {}) if "code" in job else main(job["argv"])
        except BaseException:
            traceback.print_exc()
            code = 1
    uses_onednn = torch._C._get_mkldnn_enabled()
    os.environ[cpu.CAP] = LOWEST  # of no effect where oneDNN was used before
    found = {"code": code or 0, "out": out.getvalue(), "err": err.getvalue(), "uses_onednn": uses_onednn}
    yield {**found, "instructions": cpu.instructions_in_use()}


if __name__ == "__main__":
    outcomes = {}
    for name, job in json.load(sys.stdin).items():
        outcome = child_process.run(lambda: work(job), 120)  # noqa: B023  called before it changes
        outcomes[name] = outcome.answers[0] if outcome.answers else {"code": outcome.failure}
    print(json.dumps(outcomes))
