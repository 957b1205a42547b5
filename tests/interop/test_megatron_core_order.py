"""data.order: megatron beside a megatron-core that runs here and now, on stores nobody has seen before.

Set GPTWORKS_MEGATRON_PYTHON to an interpreter that has megatron-core 0.16 with its compiled helpers.
"""

import json
import os
import random
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gptworks.data import foreign_order

FOLDER = Path(__file__).parents[1] / "fixtures" / "orders"

pytestmark = pytest.mark.interop


def random_cases(draws: random.Random) -> dict[str, Any]:
    stores = {
        f"s{k}": [draws.choice([0, 1, draws.randint(1, 300)]) for _ in range(draws.randint(80, 400))] for k in range(4)
    }
    cases = []
    for _ in range(12):
        names = draws.sample(sorted(stores), draws.choice([1, 1, 2, 3]))
        weights = [draws.uniform(0.1, 5) for _ in names] if draws.random() < 0.6 else None
        asked: list[int | None] = [draws.randint(300, 3000), draws.randint(100, 300), draws.randint(100, 300)]
        if weights is None and len(names) > 1:  # one epoch is all there is
            asked = [draws.randint(10, 300), None, None]
        case = {"stores": names, "seed": draws.randrange(2**32), "seq_len": draws.randint(2, 50), "weights": weights}
        cases.append(case | {"split": draws.choice(["80,10,10", "70,20,10", "8.5,1,0.5"]), "asked": asked})
    shares = [draws.random() + 0.01 for _ in range(9)]
    mixtures = [
        {"shares": [share / sum(shares) for share in shares], "size": 50_000},
        {"sizes": [draws.randint(1, 5000) for _ in range(7)]},
    ]
    return {"stores": stores, "cases": cases, "mixtures": mixtures}


def test_every_sample_is_megatron_cores(tmp_path: Path) -> None:
    python = os.environ.get("GPTWORKS_MEGATRON_PYTHON")
    if not python:
        pytest.skip("GPTWORKS_MEGATRON_PYTHON does not name an interpreter with megatron-core")
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"stores drawn with seed {seed}")
    asked, answers = tmp_path / "cases.json", tmp_path / "answers.json"
    asked.write_text(json.dumps(random_cases(random.Random(seed))))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [python, str(FOLDER / "make_megatron_orders.py"), str(asked), str(answers)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    made = json.loads(answers.read_text())
    compared = runpy.run_path(str(FOLDER / "check.py"))
    for number, case in enumerate(made["cases"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        compared["check"](case, made["stores"], folder)
    weighted, exhaustive = made["mixtures"]
    for found, expected in (
        (foreign_order.weighted_blend(weighted["shares"], weighted["size"]), weighted["answer"]),
        (foreign_order.exhaustive_blend(exhaustive["sizes"]), exhaustive["answer"]),
    ):
        assert [compared["digest"](index) for index in found] == expected
