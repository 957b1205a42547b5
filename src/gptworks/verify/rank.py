"""A rank of the layout that is compared: python -m gptworks.verify.rank SPEC, started by the launcher."""

import json
import sys
from pathlib import Path

from gptworks.config.load import from_dict
from gptworks.launch import process_group
from gptworks.launch.reporting import reporting
from gptworks.verify import measure

RESULT = "found.json"


def main(spec: Path) -> None:
    asked = json.loads(spec.read_text(encoding="utf-8"))
    cfg = from_dict(asked["config"])
    world = process_group.start(cfg.parallel, cfg.run)
    results = measure.compare(cfg, world, asked["steps"], spec.parent, synthetic=asked["synthetic"])
    if world.is_main:
        results.write(spec.parent / RESULT)


if __name__ == "__main__":
    with reporting():
        main(Path(sys.argv[1]))
