"""The demo's picture, an SVG: mean departure delay by hour of the day."""

from __future__ import annotations

from collections.abc import Mapping

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 760, 380, 60, 50, 50


def bars(title: str, means: Mapping[int, float]) -> str:
    """A bar for each of the 24 hours; none where there were no flights."""
    highest = max([10.0, *means.values()])
    step = (WIDTH - LEFT - 20) / 24
    scale = (HEIGHT - TOP - BOTTOM) / highest
    base = HEIGHT - BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="26" text-anchor="middle" font-size="16">{title}</text>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">hour of scheduled departure</text>',
        f'<text transform="translate(16,{HEIGHT / 2}) rotate(-90)" text-anchor="middle">mean delay, minutes</text>',
    ]
    for value in range(0, int(highest) + 1, 5):
        y = base - value * scale
        lines.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - 20}" stroke="#ddd"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value}</text>')
    for hour in range(24):
        x = LEFT + hour * step
        lines.append(f'<text x="{x + step / 2:.1f}" y="{base + 16}" text-anchor="middle">{hour}</text>')
        height = max(means.get(hour, 0.0), 0.0) * scale
        lines.append(
            f'<rect x="{x + 2:.1f}" y="{base - height:.1f}" width="{step - 4:.1f}" height="{height:.1f}" fill="#36c"/>'
        )
    return "\n".join([*lines, "</svg>", ""])
