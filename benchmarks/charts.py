"""Line charts as SVG, by hand: a few series over steps, with bands, for results that are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 360, 56, 34, 16, 44


@dataclass
class Series:
    """Points (x, y) and how they are drawn; `low` and `high` (x, y) make a band."""

    points: Sequence[tuple[float, float]]
    color: str
    dashed: bool = False


def lines(title: str, series: Mapping[str, Sequence[Series]], *, x: str = "step", y: str = "", top: float = 1.0) -> str:
    """An SVG of several named groups of series over one pair of axes, from 0 to `top`."""
    last = max((point[0] for group in series.values() for line in group for point in line.points), default=1.0) or 1.0

    def at(point: tuple[float, float]) -> str:
        across = LEFT + (WIDTH - LEFT - RIGHT) * point[0] / last
        up = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(point[1], top) / top
        return f"{across:.1f},{up:.1f}"

    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{title}</text>',
    ]
    for i in range(6):
        value = top * i / 5
        left, up = at((0.0, value)).split(",")
        elements.append(f'<line x1="{left}" x2="{WIDTH - RIGHT}" y1="{up}" y2="{up}" stroke="#ddd"/>')
        elements.append(f'<text x="{LEFT - 8}" y="{float(up) + 4:.1f}" text-anchor="end">{value:.1f}</text>')
        across = at((last * i / 5, 0.0)).split(",")[0]
        elements.append(f'<text x="{across}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{last * i / 5:.0f}</text>')
    elements.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">{x}</text>')
    elements.append(f'<text x="14" y="{TOP - 8}">{y}</text>')
    for k, (name, group) in enumerate(series.items()):
        for line in group:
            dashes = ' stroke-dasharray="5 4"' if line.dashed else ""
            path = " ".join(map(at, line.points))
            elements.append(f'<polyline points="{path}" fill="none" stroke="{line.color}" stroke-width="1.8"{dashes}/>')
        if group:
            place = WIDTH - RIGHT - 190, TOP + 8 + 18 * k
            elements.append(f'<line x1="{place[0]}" x2="{place[0] + 24}" y1="{place[1]}" y2="{place[1]}" '
                        f'stroke="{group[0].color}" stroke-width="2"/>')  # fmt: skip
            elements.append(f'<text x="{place[0] + 30}" y="{place[1] + 4}">{name}</text>')
    return "\n".join([*elements, "</svg>"])
