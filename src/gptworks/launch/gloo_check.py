"""Whether processes of this machine could meet: two members of a gloo group, both in this process."""

import threading
from datetime import timedelta

import torch
from torch import distributed

from gptworks.errors import first_line


def gloo(timeout: float = 10.0) -> str:
    """Empty where it works, else what went wrong: most often an interface or a host name that leads nowhere."""
    if not distributed.is_gloo_available():
        return "this torch has no gloo"
    store, sums, failures = distributed.HashStore(), [0.0, 0.0], []

    def meet(rank: int) -> None:
        try:
            group = distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=timeout))
            number = torch.tensor([rank + 1.0])
            group.allreduce([number]).wait()  # type: ignore[attr-defined]  # not in torch's stubs
            sums[rank] = number.item()
        except RuntimeError as error:
            failures.append(first_line(error))

    members = [threading.Thread(target=meet, args=(rank,), daemon=True) for rank in range(2)]
    for member in members:
        member.start()
    for member in members:
        member.join(timeout + 5)
    if failures:
        return failures[0]
    return "" if sums == [3.0, 3.0] else f"1 + 2 came out as {sums} within {timeout:g} seconds"
