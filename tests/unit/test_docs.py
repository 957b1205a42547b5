"""Pages for people: every link leads somewhere, and what is to be read in two languages is there in both."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
# Decisions, the notebook and the reference, of which much is generated, are in English alone.
IN_BOTH = [ROOT / "README.md", ROOT / "docs/tutorial.md", *(p for f in ("howto", "explain", "from") for p in
           sorted(ROOT.glob(f"docs/{f}/*.md")) if not p.name.endswith(".zh.md"))]  # fmt: skip


def targets(text: str) -> list[str]:
    """What links and pictures of a page point to, but for other sites; code is no text."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", prose)) + re.findall(r'src="([^"]+)"', prose)
    return [each for each in found if not re.match(r"[a-z]+:", each)]


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    found = []
    for target in targets(page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        has_anchors = file.suffix == ".md" and file.exists()
        if not file.exists() or (anchor and has_anchors and anchor not in anchors(file.read_text(encoding="utf-8"))):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_pages_are_there_in_both_languages() -> None:
    assert len(IN_BOTH) > 20
    missing = [str(page.relative_to(ROOT)) for page in IN_BOTH if not page.with_suffix(".zh.md").is_file()]
    assert missing == []


def test_a_chinese_page_leads_to_chinese_pages() -> None:
    """Where there is one. A link back to the English page itself is its second line."""
    wrong = []
    for page in PAGES:
        if page.name.endswith(".zh.md"):
            for target in targets(page.read_text(encoding="utf-8")):
                file = (page.parent / target.partition("#")[0]).resolve()
                own = page.with_name(page.name.replace(".zh.md", ".md"))
                is_english = file.suffix == ".md" and not file.name.endswith(".zh.md") and file != own
                if is_english and file.with_suffix(".zh.md").is_file():
                    wrong.append(f"{page.relative_to(ROOT)}: {target}")
    assert wrong == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# Some heading\n")
    page = tmp_path / "a.md"
    page.write_text("[x](b.md) [y](b.md#some-heading) `[not](one)` [web](https://x.y)\n```\n[code](c)\n```\n")
    assert broken(page) == []
    page.write_text('[x](c.md) [y](b.md#another) [z](#here)\n<img src="p.png">\n')
    assert broken(page) == ["c.md", "b.md#another", "#here", "p.png"]
