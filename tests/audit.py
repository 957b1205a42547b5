"""Known vulnerabilities of the versions in constraints.txt: `make audit`.

pip-audit says "no known vulnerabilities" also when its source knows none of the packages. So each source is first asked
about a version that is known to be vulnerable, and is believed only when it knows that one.

Exit 1: a version is vulnerable. Where no source answers, nothing was found out: that is said, with exit 0, or with
AUDIT_STRICT=1 in the environment with exit 2.
"""

import importlib.util
import json
import os
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
    if importlib.util.find_spec("pip_audit") is None:
        return not_audited("pip-audit is not installed and could not be")
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
    return not_audited("no source of vulnerabilities answered")


def not_audited(why: str) -> int:
    """Neither good nor bad: it must not look like either."""
    print(
        f"NOT AUDITED: {why}, so nothing is known of the versions in constraints.txt. "
        "Run `make audit` where a list of vulnerabilities can be reached."
    )
    return 2 if os.environ.get("AUDIT_STRICT") == "1" else 0


def report(source: str, found: list[dict[str, object]] | str) -> int:
    if isinstance(found, str):
        return not_audited(f"{source} has no answer about them: {found}")
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
