"""`make audit` believes a source only when it knows what is known, and says when nobody answered."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
VULNERABLE = [{"name": "pyyaml", "version": "5.3", "vulns": [{"id": "CVE-2020-1747"}]}]
CLEAN: list[dict[str, Any]] = [{"name": "torch", "version": "2.13", "vulns": []}]


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", TESTS / "audit.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delenv("AUDIT_STRICT", raising=False)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: spec)
    return module


def answers(module: ModuleType, monkeypatch: pytest.MonkeyPatch, control: object, locked: object) -> None:
    """What each source says of the version that is known to be vulnerable, and of the locked ones."""
    monkeypatch.setattr(
        module, "audit", lambda source, file: control if file.name == "control.txt" else locked, raising=True
    )


@pytest.mark.parametrize(
    "control", ["a name could not be resolved", [{"name": "pyyaml", "skip_reason": "not found on PyPI"}]]
)
@pytest.mark.parametrize(("strict", "code"), [("", 0), ("1", 2)])
def test_no_source_answers(
    audit: ModuleType,
    control: object,
    strict: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers(audit, monkeypatch, control, CLEAN)
    monkeypatch.setenv("AUDIT_STRICT", strict)
    assert audit.main() == code
    printed = capsys.readouterr().out
    assert "NOT AUDITED: no source of vulnerabilities answered" in printed
    assert "0 of them vulnerable" not in printed


def test_a_source_that_answers(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(audit, monkeypatch, VULNERABLE, CLEAN)
    assert audit.main() == 0
    assert "pypi: 1 packages known, 0 of them vulnerable" in capsys.readouterr().out
    answers(audit, monkeypatch, VULNERABLE, [*CLEAN, *VULNERABLE])
    assert audit.main() == 1
    printed = capsys.readouterr().out
    assert "pyyaml 5.3: CVE-2020-1747" in printed and "2 packages known, 1 of them vulnerable" in printed


def test_a_source_that_stops_answering_is_no_good_end(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(audit, monkeypatch, VULNERABLE, "the connection was lost")
    monkeypatch.setenv("AUDIT_STRICT", "1")
    assert audit.main() == 2
    assert "NOT AUDITED: pypi has no answer about them: the connection was lost" in capsys.readouterr().out
