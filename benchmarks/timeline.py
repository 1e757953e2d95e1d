"""A picture of the kernels of a step: a bar for each, from its start to its end."""

from collections.abc import Sequence
from dataclasses import dataclass

SCALE, LANE, LANES, LEFT, TOP = 14.0, 26, 4, 10, 30
"""Pixels of a microsecond and of a lane; bars take the lanes in turn, so that those that overlap are seen."""


@dataclass(frozen=True)
class Bar:
    """A kernel: its name, and start and end in microseconds."""

    name: str
    start: float
    end: float


def middle(bars: Sequence[Bar], parts: int) -> list[Bar]:
    """The bars of about one of ``parts`` equal parts, from the middle, in order of their start."""
    ordered = sorted(bars, key=lambda bar: bar.start)
    count = max(1, len(ordered) // parts)
    first = (len(ordered) - count) // 2
    return ordered[first : first + count]


def picture(bars: Sequence[Bar], title: str) -> str:
    """An SVG of ``bars``; time begins with the first."""
    zero, last = min(bar.start for bar in bars), max(bar.end for bar in bars)
    width, bottom = 2 * LEFT + (last - zero) * SCALE + 80, TOP + LANES * LANE
    shapes = []
    for number, bar in enumerate(bars):
        x, y = LEFT + (bar.start - zero) * SCALE, TOP + number % LANES * LANE
        length = max((bar.end - bar.start) * SCALE, 1.0)
        shapes.append(f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="{LANE - 4}" class="bar"/>')
        shapes.append(f'<text x="{x + 2:.1f}" y="{y + 14}">{bar.name.strip("_")[:16]}</text>')
    for mark in range(0, int(last - zero) + 1, 10):
        x = LEFT + mark * SCALE
        shapes.append(f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{bottom}" class="mark"/>')
        shapes.append(f'<text x="{x}" y="{bottom + 14}">{mark} us</text>')
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{bottom + 24}" font-size="10" '
            'font-family="sans-serif">',
            "<style>.bar{fill:#9cf;stroke:#06c;fill-opacity:0.6}.mark{stroke:#bbb;stroke-dasharray:2}</style>",
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="{LEFT}" y="18" font-size="12">{title}</text>',
            *shapes,
            "</svg>\n",
        )
    )
