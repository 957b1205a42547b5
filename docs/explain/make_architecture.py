"""Draws docs/explain/architecture.svg from the imports of src/gptworks: `python docs/explain/make_architecture.py`.

A box is a package or, with a dashed border, a single file that packages share. What is drawn above imports what is
below, never the other way round. A line is left out where there is a way over other boxes.
"""

import ast
from collections.abc import Mapping
from html import escape
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "gptworks"
TARGET = Path(__file__).with_name("architecture.svg")
FRONT_DOOR = {"__init__", "__main__"}  # names what is inside, lazily
DRAWN_FILES = {"architecture", "optimizer_state"}  # the other single files stand in one box at the bottom

WIDTH, ROW, BOX_HEIGHT, MARGIN, LETTER = 900, 62, 30, 20, 8.2


def package_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_of(packages: set[str]) -> dict[str, set[str]]:
    """Package -> packages that any of its files imports, anywhere in the file."""
    found: dict[str, set[str]] = {name: set() for name in packages}
    for file in sorted(SOURCE.rglob("*.py")):
        mine = package_of(file)
        if mine in FRONT_DOOR:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            parts = [name.split(".") for name in names if name.startswith("gptworks.")]
            found[mine] |= {part[1] for part in parts if part[1] in packages} - {mine}
    return found


def is_drawn(name: str) -> bool:
    return (SOURCE / name).is_dir() or name in DRAWN_FILES


def levels_of(graph: Mapping[str, set[str]]) -> dict[str, int]:
    """0 for what imports nothing that is drawn; one more than the highest that is imported for all else."""
    levels: dict[str, int] = {}

    def level(name: str) -> int:
        if name not in levels:
            levels[name] = 1 + max((level(below) for below in graph[name]), default=-1)
        return levels[name]

    for name in graph:
        level(name)
    return levels


def without_detours(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Only the lines that are no short cut of a way over others."""

    def below(name: str) -> set[str]:
        return graph[name] | {deeper for each in graph[name] for deeper in below(each)}

    return {
        name: {each for each in near if not any(each in below(o) for o in near - {each})}
        for name, near in graph.items()
    }


def svg() -> str:
    packages = {package_of(file) for file in SOURCE.rglob("*.py")} - FRONT_DOOR
    whole = imports_of(packages)
    small = sorted(name for name in packages if not is_drawn(name))
    graph = {name: {each for each in below if is_drawn(each)} for name, below in whole.items() if is_drawn(name)}
    levels = levels_of(graph)
    top = max(levels.values())
    places: dict[str, tuple[float, float, float]] = {}
    for level in range(top + 1):
        row = sorted(name for name in levels if levels[name] == level)
        widths = [LETTER * len(name) + 28 for name in row]
        x = (WIDTH - sum(widths) - 24 * (len(row) - 1)) / 2 + (28 if level % 2 else -28)
        for name, width in zip(row, widths, strict=True):
            places[name] = (x, MARGIN + ROW * (top - level), width)
            x += width + 24
    bottom = MARGIN + ROW * (top + 1)
    lines = []
    for name, near in sorted(without_detours(graph).items()):
        for each in sorted(near):
            (ax, ay, aw), (bx, by, bw) = places[name], places[each]
            start, end = f"{ax + aw / 2:.0f} {ay + BOX_HEIGHT:.0f}", f"{bx + bw / 2:.0f} {by:.0f}"
            bend = f"{ax + aw / 2:.0f} {(ay + BOX_HEIGHT + by) / 2:.0f}"
            lines.append(f'<path d="M{start} Q{bend} {end}" class="line"/>')
    boxes = []
    for name, (x, y, width) in sorted(places.items()):
        kind = "box" if (SOURCE / name).is_dir() else "box file"
        boxes.append(f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{BOX_HEIGHT}" rx="5" class="{kind}"/>')
        boxes.append(f'<text x="{x + width / 2:.0f}" y="{y + 20:.0f}" class="name">{escape(name)}</text>')
    half = (len(small) + 1) // 2
    for number, part in enumerate((small[:half], small[half:])):
        text = escape(", ".join(part))
        boxes.append(f'<text x="{WIDTH / 2:.0f}" y="{bottom + 16 + 18 * number:.0f}" class="small">{text}</text>')
    height = bottom + 48
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
            "<title>Packages of gptworks: each imports only what is drawn below it</title>",
            "<style>.box{fill:#eef3fb;stroke:#34588f}.file{fill:#fbf7ea;stroke-dasharray:4 3}"
            ".name{font-size:14px;text-anchor:middle;fill:#1c2733}.small{font-size:12px;text-anchor:middle;fill:#5a6673}"
            ".line{fill:none;stroke:#9fb0c8;stroke-width:1.2}</style>",
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            *lines,
            *boxes,
            "</svg>",
            "",
        ]
    )


def main() -> None:
    TARGET.write_text(svg(), encoding="utf-8")
    print(TARGET)


if __name__ == "__main__":
    main()
