"""Draws the pictures of parallelism.md. Run: python docs/explain/make_pictures.py

Boxes, arrows and words, nothing else. The pipeline's timelines are computed: every rank follows the order of its
schedule and waits for what it needs.
"""

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
INK, FAINT, PAPER = "#2b2b2b", "#8a8a8a", "#ffffff"
BLUE, ORANGE, GREEN, VIOLET, GREY = "#bcd7f2", "#fbd3a4", "#c5e5bd", "#dccbf0", "#eeeeee"
DARK_BLUE, DARK_ORANGE = "#7fb0e0", "#f2a65a"


@dataclass
class Picture:
    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, w: float, h: float, words: str = "", fill: str = GREY, size: int = 13) -> None:
        shape = f'x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{min(6, w / 5, h / 5):g}"'
        self.parts.append(f'<rect {shape} fill="{fill}" stroke="{INK}" stroke-width="1.1"/>')
        lines = words.split("\n") if words else []
        for number, line in enumerate(lines):
            middle = y + h / 2 + size * 0.36 + (number - (len(lines) - 1) / 2) * size * 1.25
            self.words(x + w / 2, middle, line, size=size, anchor="middle")

    def frame(self, x: float, y: float, w: float, h: float) -> None:
        shape = f'x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="8"'
        self.parts.append(f'<rect {shape} fill="none" stroke="{FAINT}" stroke-width="1.2" stroke-dasharray="5 4"/>')

    def words(
        self, x: float, y: float, text: str, size: int = 13, anchor: str = "start", color: str = INK, bold: bool = False
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        place = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{color}"{weight}'
        self.parts.append(f"<text {place}>{escape(text)}</text>")

    def arrow(self, *points: tuple[float, float], both: bool = False, color: str = INK) -> None:
        way = " ".join(f"{x:g},{y:g}" for x, y in points)
        ends = 'marker-end="url(#tip)"' + (' marker-start="url(#tip)"' if both else "")
        self.parts.append(f'<polyline points="{way}" fill="none" stroke="{color}" stroke-width="1.5" {ends}/>')

    def svg(self) -> str:
        tip = (
            '<marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0,1 L9,5 L0,9 z" fill="{INK}"/></marker>'
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" font-family="DejaVu Sans, Verdana, sans-serif">'
        )
        paper = f'<rect width="{self.width}" height="{self.height}" rx="10" fill="{PAPER}"/>'
        return "\n".join([head, f"<defs>{tip}</defs>", paper, *self.parts, "</svg>", ""])


def data_parallel() -> Picture:
    picture = Picture(860, 300)
    picture.words(20, 30, "dp=2: every rank has the whole model, and reads rows of its own", bold=True, size=15)
    picture.words(68, 68, "global batch", anchor="middle", color=FAINT)
    for row in range(8):
        picture.box(20, 78 + row * 22, 96, 20, f"row {row}", BLUE if row < 4 else ORANGE, size=11)
    for rank, (top, fill) in enumerate(((70, BLUE), (180, ORANGE))):
        picture.frame(170, top - 8, 390, 92)
        picture.words(182, top + 10, f"rank {rank}", color=FAINT, size=12)
        picture.arrow((118, top + 48), (182, top + 48))
        picture.box(184, top + 22, 130, 52, "model,\nall of it", GREY)
        picture.arrow((316, top + 48), (372, top + 48))
        picture.box(374, top + 22, 170, 52, f"gradient\nof rows {4 * rank} to {4 * rank + 3}", fill)
    picture.arrow((546, 118), (626, 150))
    picture.arrow((546, 228), (626, 182))
    picture.box(628, 136, 88, 60, "sum over\ndp", GREEN)
    picture.arrow((718, 166), (754, 166))
    picture.box(756, 136, 88, 60, "the same\nupdate", GREY)
    picture.words(628, 222, "once per step:", size=12, color=FAINT)
    picture.words(628, 238, "all_reduce of P numbers", size=12, color=FAINT)
    picture.words(20, 284, "Losses are summed and divided by the count of all ranks: no mean of means.", size=12)
    return picture


def sharding() -> Picture:
    ranks = 4
    picture = Picture(860, 310)
    title = f"fsdp={ranks}: what one rank holds while it trains, in units of P (the parameters in fp32)"
    picture.words(20, 30, title, bold=True, size=15)
    # parameters gathered, own shard of them, gradients, two moments
    held = {
        0: (1.0, 0.0, 1.0, 2.0),
        1: (1.0, 1 / ranks, 1.0, 2 / ranks),
        2: (1.0, 1 / ranks, 1 / ranks, 2 / ranks),
        3: (0.0, 1 / ranks, 1 / ranks, 2 / ranks),
    }
    kinds = (
        ("parameters, whole", BLUE),
        ("own shard of them", DARK_BLUE),
        ("gradients", ORANGE),
        ("Adam's moments", VIOLET),
    )
    for number, (kind, fill) in enumerate(kinds):
        picture.box(20 + number * 190, 50, 18, 18, fill=fill)
        picture.words(44 + number * 190, 64, kind, size=12)
    names = ("nothing sharded", "optimizer", "+ gradients", "+ parameters")
    unit = 145
    for zero, sizes in held.items():
        y = 90 + zero * 50
        picture.words(20, y + 15, f"zero {zero}", bold=True)
        picture.words(20, y + 31, names[zero], size=11, color=FAINT)
        x = 140.0
        for size, (_, fill) in zip(sizes, kinds, strict=True):
            if size:
                picture.box(x, y, size * unit, 36, f"{size:g}", fill, size=12)
                x += size * unit
        more = " + the block at work" if zero == 3 else ""
        picture.words(x + 10, y + 23, f"= {sum(sizes):g} P{more}", size=12)
    picture.words(20, 300, "Between the first and the last micro-batch of a step; activations come on top.", size=12)
    return picture


def tensor_parallel() -> Picture:
    picture = Picture(900, 330)
    picture.words(20, 30, "tp=2: each matrix is cut in two; heads and words belong to one rank", bold=True, size=15)
    for rank, (top, fill) in enumerate(((74, BLUE), (194, ORANGE))):
        picture.frame(16, top - 12, 868, 96)
        picture.words(26, top + 3, f"rank {rank}", color=FAINT, size=12)
        middle = top + 44
        picture.box(26, top + 18, 108, 52, "stream, norm:\nits half\nof the tokens", fill, size=11)
        picture.arrow((136, middle), (172, middle))
        picture.arrow((232, middle), (266, middle))
        picture.box(268, top + 18, 128, 52, f"qkv, or up:\ncolumns of rank {rank}", fill, size=11)
        picture.arrow((398, middle), (424, middle))
        picture.box(426, top + 18, 112, 52, "its heads,\nor GELU", fill, size=11)
        picture.arrow((540, middle), (566, middle))
        picture.box(568, top + 18, 118, 52, f"out, or down:\nrows of rank {rank}", fill, size=11)
        picture.arrow((688, middle), (716, middle))
        picture.arrow((776, middle), (798, middle))
        picture.box(800, top + 18, 76, 52, "stream", fill, size=11)
    picture.box(174, 84, 58, 184, "gather\nthe\ntokens", GREEN, size=12)
    picture.box(718, 84, 58, 184, "sum,\nthen\nscatter\ntokens", GREEN, size=12)
    picture.words(20, 304, "Twice per block (attention, feed-forward). The backward pass runs it in reverse.", size=12)
    without = "sequence: false keeps the stream whole on each rank, with an all_reduce behind the rows only."
    picture.words(20, 321, without, size=12, color=FAINT)
    return picture


@dataclass(frozen=True)
class Pass:
    """A forward or backward pass of one micro-batch through one stage."""

    forward: bool
    micro: int
    stage: int


def order_of(rank: int, pp: int, micro_batches: int, chunks: int) -> list[Pass]:
    """1F1B: as many forward passes as it takes to keep the ranks behind busy, then in turns. With several stages per
    rank, groups of pp micro-batches go through one after the other."""
    total = micro_batches * chunks

    def at(number: int, forward: bool) -> Pass:
        chunk = number // pp % chunks if chunks > 1 else 0
        micro = number // (pp * chunks) * pp + number % pp if chunks > 1 else number
        return Pass(forward, micro, rank + pp * (chunk if forward else chunks - 1 - chunk))

    ahead = pp - 1 - rank if chunks == 1 else (chunks - 1) * pp + 2 * (pp - 1 - rank)
    ahead = min(ahead, total)
    found = [at(number, True) for number in range(ahead)]
    for number in range(ahead, total):
        found += [at(number, True), at(number - ahead, False)]
    return found + [at(number, False) for number in range(total - ahead, total)]


def timeline(pp: int, micro_batches: int, chunks: int) -> list[list[tuple[Pass, float]]]:
    """When each pass of each rank begins; a backward pass takes twice as long as a forward pass."""
    orders = [order_of(rank, pp, micro_batches, chunks) for rank in range(pp)]
    last = pp * chunks - 1
    ended: dict[Pass, float] = {}
    begun: list[list[tuple[Pass, float]]] = [[] for _ in range(pp)]
    free = [0.0] * pp
    while any(orders):
        for rank, order in enumerate(orders):
            while order:
                one = order[0]
                needed = [Pass(True, one.micro, one.stage - 1)] if one.forward and one.stage else []
                if not one.forward:
                    needed = [
                        Pass(True, one.micro, last) if one.stage == last else Pass(False, one.micro, one.stage + 1)
                    ]
                if any(other not in ended for other in needed):
                    break
                start = max([free[rank], *(ended[other] for other in needed)])
                free[rank] = ended[one] = start + (1 if one.forward else 2) / chunks
                begun[rank].append((order.pop(0), start))
    return begun


def pipeline() -> Picture:
    pp, micro_batches = 4, 8
    picture = Picture(960, 440)
    picture.words(
        20, 30, f"pp={pp}: layers cut into stages, {micro_batches} micro-batches on their way", bold=True, size=15
    )
    key = ((BLUE, "forward"), (ORANGE, "backward"), (DARK_BLUE, "forward, second stage"))
    for number, (fill, kind) in enumerate((*key, (DARK_ORANGE, "backward, second stage"))):
        x = (20, 120, 230, 420)[number]
        picture.box(x, 46, 16, 16, fill=fill)
        picture.words(x + 22, 59, kind, size=12)
    unit = 25.0
    for chunks, top, name in ((1, 92, "1f1b"), (2, 270, "interleaved, virtual_stages: 2")):
        begun = timeline(pp, micro_batches, chunks)
        end = max(start + (1 if one.forward else 2) / chunks for passes in begun for one, start in passes)
        idle = 1 - 3 * micro_batches / end
        picture.words(20, top, f"{name}: {end:g} units of time, each rank idle for {idle:.0%} of them")
        for rank, passes in enumerate(begun):
            y = top + 14 + rank * 30
            picture.words(20, y + 17, f"rank {rank}", size=12, color=FAINT)
            for one, start in passes:
                length = (1 if one.forward else 2) / chunks * unit
                colors = (BLUE, DARK_BLUE) if one.forward else (ORANGE, DARK_ORANGE)
                fill = colors[one.stage // pp]
                picture.box(76 + start * unit, y, length, 25, str(one.micro), fill, size=10 if chunks == 1 else 9)
    return picture


def mesh() -> Picture:
    picture = Picture(860, 400)
    picture.words(
        20, 30, "pp=2 x dp=2 x fsdp=2 x tp=2: 16 ranks, each with a place in four directions", bold=True, size=15
    )
    rank = 0
    for stage in range(2):
        left = 20 + stage * 430
        picture.frame(left, 48, 390, 262)
        picture.words(
            left + 12, 68, f"pp {stage}: {'the first half' if stage == 0 else 'the other half'} of the layers", size=12
        )
        for replica in range(2):
            x = left + 14 + replica * 190
            picture.frame(x, 80, 172, 218)
            picture.words(x + 10, 98, f"dp {replica}", size=12, color=FAINT)
            for shard in range(2):
                y = 110 + shard * 94
                picture.words(x + 10, y + 12, f"fsdp {shard}", size=11, color=FAINT)
                for tensor in range(2):
                    fill = (BLUE, ORANGE)[tensor]
                    picture.box(x + 12 + tensor * 80, y + 20, 66, 50, f"rank {rank}\ntp {tensor}", fill, size=11)
                    rank += 1
                picture.arrow((x + 78, y + 45), (x + 92, y + 45), both=True)
            picture.arrow((x + 64, 182), (x + 64, 222), both=True)
            picture.arrow((x + 125, 182), (x + 125, 222), both=True)
        picture.arrow((left + 188, 190), (left + 202, 190), both=True)
    picture.arrow((412, 190), (448, 190), both=True)
    lines = (
        "Numbers run along tp first: the ranks that talk most are neighbours, on one machine if its devices suffice.",
        "tp: every layer   |   fsdp: every block, or once per step   |   dp: once per step   |   pp: every micro-batch",
        "Samples differ along dp and fsdp; ranks along tp and pp read the same ones.",
    )
    for number, line in enumerate(lines):
        picture.words(20, 336 + number * 22, line, size=12)
    return picture


PICTURES = {
    "data-parallel.svg": data_parallel,
    "sharding.svg": sharding,
    "tensor-parallel.svg": tensor_parallel,
    "pipeline.svg": pipeline,
    "mesh.svg": mesh,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw().svg(), encoding="utf-8")
