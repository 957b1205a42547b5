"""Claim: what `gptworks plan` says can be trusted. Predicted against published, and against ourselves.

    python benchmarks/plan.py [published-memory] [published-speed] [ourselves]

published-memory   46 figures of other systems, each under the rules by which that system allocates (plan_memory.py)
published-speed    111 rows of other systems' tables, each also by a fit that did not see it (plan_speed.py)
ourselves          real steps on this CPU, bytes on the wire, closed form against simulator (plan_ourselves.py)

All of it takes some minutes. The tables are in docs/explain/memory-model.md; plan_fit.py makes the fit.
"""

import argparse
import subprocess
import sys
from pathlib import Path

PARTS = {"published-memory": "plan_memory.py", "published-speed": "plan_speed.py", "ourselves": "plan_ourselves.py"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="which; all of them if not said")
    worst = 0
    for part in parser.parse_args().parts or PARTS:
        print(f"== {part}", flush=True)
        done = subprocess.run([sys.executable, Path(__file__).with_name(PARTS[part])], check=False)
        worst = max(worst, done.returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main())
