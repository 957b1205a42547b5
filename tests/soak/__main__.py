"""python -m soak --minutes 30 --seed 1: see the package."""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "unit"), str(TESTS / "cli")]  # generators of the tests are used again

from soak import driver  # noqa: E402
from soak.campaign import Campaign  # noqa: E402
from soak.parts import all_parts  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1, help="of the campaign; tries count up from seed x 1,000,000")
    parser.add_argument("--only", default="", metavar="PART,...", help="some parts instead of all")
    parser.add_argument("--repeat", default="", metavar="PART:SEED", help="one try again, as the table names it")
    parser.add_argument(
        "--plant", default="", metavar="FAULT", help="put a fault into gptworks, to see that it is found"
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="tries side by side")
    parser.add_argument("--folder", type=Path, help="to work in (default: a new one, removed when nothing was found)")
    args = parser.parse_args()
    if args.plant:
        driver.plant(args.plant)
    named = args.repeat.partition(":")[0] or args.only
    parts = [part for part in all_parts() if not named or part.name in named.split(",")]
    if not parts:
        parser.error(f"no part {named!r}. Parts: {', '.join(part.name for part in all_parts())}")
    folder = tempfile.mkdtemp(prefix="soak-", dir=args.folder)
    campaign = Campaign(parts, Path(folder), args.seed)
    began = time.monotonic()
    if args.repeat:
        campaign.repeat(parts[0].name, int(args.repeat.partition(":")[2]))
    else:
        campaign.run(60 * args.minutes, args.jobs)
    spent = (time.monotonic() - began) / 60
    print(f"\nsoak: seed {args.seed}, {spent:.1f} minutes, {args.jobs} tries side by side; {_machine()}")
    print("\n".join(campaign.table()), flush=True)
    if campaign.has_failed:
        print(f"what failed is kept in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


def _machine() -> str:
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=TESTS, capture_output=True, text=True, check=False
    )
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = models[0].partition(":")[2].strip() if models else platform.machine()
    return f"{time.strftime('%Y-%m-%d')}, commit {asked.stdout.strip() or 'unknown'}, {len(models)} x {cpu}"


if __name__ == "__main__":
    raise SystemExit(main())
