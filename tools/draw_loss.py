"""Draw the held-out curves of a training log: ``python tools/draw_loss.py log.jsonl curve.svg``."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT, EDGE = 420, 240, 44

Point = tuple[float, float]


def curve(points: Sequence[Point], title: str, left: int) -> str:
    """One panel: a line through ``points`` with the values of its corners written beside the axes."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = min(ys), max(ys)

    def place(x: float, y: float) -> str:
        across = EDGE + (x - xs[0]) / (xs[-1] - xs[0]) * (WIDTH - 2 * EDGE)
        down = EDGE + (high - y) / (high - low) * (HEIGHT - 2 * EDGE)
        return f"{left + across:.1f},{down:.1f}"

    bottom = HEIGHT - EDGE
    return "\n".join(
        (
            f'<text x="{left + WIDTH / 2}" y="22" text-anchor="middle">{title}</text>',
            f'<rect x="{left + EDGE}" y="{EDGE}" width="{WIDTH - 2 * EDGE}" height="{bottom - EDGE}" class="box"/>',
            f'<polyline points="{" ".join(place(x, y) for x, y in points)}" class="line"/>',
            f'<text x="{left + EDGE - 4}" y="{EDGE + 4}" text-anchor="end">{high:.2f}</text>',
            f'<text x="{left + EDGE - 4}" y="{bottom}" text-anchor="end">{low:.2f}</text>',
            f'<text x="{left + EDGE}" y="{bottom + 16}">{xs[0]:.0f}</text>',
            f'<text x="{left + WIDTH - EDGE}" y="{bottom + 16}" text-anchor="end">step {xs[-1]:.0f}</text>',
        )
    )


PANELS = {
    "held_out_bits_per_byte": "backbone: held-out bits per byte",
    "held_out_greedy_length": "drafter: drafts accepted on held-out text, greedy",
    "held_out_own_greedy_length": "drafter: drafts accepted on the model's own text, greedy",
}


def picture(lines: Sequence[dict[str, float]]) -> str:
    """An SVG of the held-out figures that the log has, one panel each."""
    curves = {title: [(d["step"], d[key]) for d in lines if key in d] for key, title in PANELS.items()}
    drawn = [(title, points) for title, points in curves.items() if points]
    width = len(drawn) * WIDTH
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" font-size="11" '
            'font-family="sans-serif">',
            "<style>.line{fill:none;stroke:#06c;stroke-width:2}.box{fill:none;stroke:#999}</style>",
            f'<rect width="{width}" height="{HEIGHT}" fill="white"/>',
            *(curve(points, title, number * WIDTH) for number, (title, points) in enumerate(drawn)),
            "</svg>",
        )
    )


def main() -> None:
    log, target = map(Path, sys.argv[1:3])
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    target.write_text(picture(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
