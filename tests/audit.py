"""Known vulnerabilities of the versions in constraints.txt: `make audit`.

pip-audit says "no known vulnerabilities" also when its source knows none of the packages. So each source is first asked
about a version that is known to be vulnerable, and is believed only when it knows that one.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KNOWN_TO_BE_VULNERABLE = "pyyaml==5.3"  # CVE-2020-1747, CVE-2020-14343
SOURCES = ("pypi", "osv")


def audit(source: str, requirements: Path) -> list[dict[str, object]] | str:
    """What pip-audit found, a line for each package; or why there is no answer."""
    options = ["--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off"]
    command = [sys.executable, "-m", "pip_audit", "--vulnerability-service", source, "-r", str(requirements), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        return (done.stderr.strip().splitlines() or ["no answer"])[-1][:200]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        control = Path(folder) / "control.txt"
        control.write_text(KNOWN_TO_BE_VULNERABLE + "\n", encoding="utf-8")
        for source in SOURCES:
            asked = audit(source, control)
            if isinstance(asked, str) or not any(each.get("vulns") for each in asked):
                why = asked if isinstance(asked, str) else asked[0].get("skip_reason", "knows no vulnerability of it")
                print(f"{source}: no answer about {KNOWN_TO_BE_VULNERABLE}, which is known to be vulnerable: {why}")
                continue
            return report(source, audit(source, ROOT / "constraints.txt"))
    print("make audit: no source answered, so nothing is known of the versions in constraints.txt.", file=sys.stderr)
    return 2


def report(source: str, found: list[dict[str, object]] | str) -> int:
    if isinstance(found, str):
        print(f"{source}: {found}", file=sys.stderr)
        return 2
    wrong = [each for each in found if each.get("vulns")]
    unknown = [str(each["name"]) for each in found if each.get("skip_reason")]
    for each in wrong:
        names = ", ".join(str(vulnerability["id"]) for vulnerability in each["vulns"])  # type: ignore[attr-defined]
        print(f"{each['name']} {each['version']}: {names}")
    print(f"{source}: {len(found) - len(unknown)} packages known, {len(wrong)} of them vulnerable")
    if unknown:
        print(f"not known there: {', '.join(unknown)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
