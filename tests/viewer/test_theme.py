"""The colors of the viewer's pages: text can be read on all of them, scales rise evenly, the safe palette is safe."""

from __future__ import annotations

import itertools
import re
from importlib import resources

import pytest

SHEET = (resources.files("rollbook.inspect") / "static" / "theme.css").read_text()
SELECTORS = {
    ("light", "default"): [":root"],
    ("light", "safe"): [":root", ':root[data-palette="safe"]'],
    ("dark", "default"): [":root", ':root[data-theme="dark"]'],
    ("dark", "safe"): [":root", ':root[data-theme="dark"]', ':root[data-theme="dark"][data-palette="safe"]'],
}
SYSTEM = {
    "default": [":root", ':root:not([data-theme="light"])'],
    "safe": [
        ":root",
        ':root:not([data-theme="light"])',
        ':root[data-palette="safe"]:not([data-theme="light"])',
    ],
}
"""What a reader with a dark system and no choice of their own gets."""
BLOCKS: dict[str, dict[str, str]] = {}
for _rule in re.finditer(r"^\s*(:root[^{},]*?)\s*\{([^{}]*)\}", SHEET, re.MULTILINE):
    BLOCKS.setdefault(_rule[1], {}).update(re.findall(r"(--[\w-]+):\s*([^;]+);", _rule[2]))
# How people without one kind of cone see linear light (Machado, Oliveira and Fernandes 2009, severity 1).
BLIND = {
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
}


def colors(selectors: list[str]) -> dict[str, str]:
    """The variables that hold where these selectors fit, the later ones first."""
    merged: dict[str, str] = {}
    for selector in selectors:
        merged |= BLOCKS[selector]
    return merged


def linear(color: str) -> tuple[float, float, float]:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return red, green, blue


def luminance(color: str) -> float:
    red, green, blue = linear(color)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(left: str, right: str) -> float:
    high, low = sorted((luminance(left), luminance(right)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("theme", "palette"), sorted(SELECTORS))
def test_text_can_be_read_on_every_bucket(theme: str, palette: str) -> None:
    palette_colors = colors(SELECTORS[theme, palette])
    for scale, i in itertools.product(("seq", "div"), range(16)):
        assert contrast(palette_colors["--text"], palette_colors[f"--{scale}-{i}"]) >= 4.5, (scale, i)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_words_and_signs_can_be_read_on_every_ground(theme: str) -> None:
    palette_colors = colors(SELECTORS[theme, "default"])
    for ink, ground in itertools.product(("text", "muted", "accent", "good", "bad", "warn"), ("bg", "panel", "raised")):
        assert contrast(palette_colors[f"--{ink}"], palette_colors[f"--{ground}"]) >= 4.5, (ink, ground)
    assert contrast(palette_colors["--on-accent"], palette_colors["--accent"]) >= 4.5
    for i in range(1, 7):
        assert contrast(palette_colors[f"--series-{i}"], palette_colors["--panel"]) >= 3


def test_a_dark_system_looks_as_the_dark_theme() -> None:
    for palette, selectors in SYSTEM.items():
        assert colors(selectors) == colors(SELECTORS["dark", palette])


@pytest.mark.parametrize(("theme", "palette"), sorted(SELECTORS))
def test_scales_are_told_apart_by_brightness_alone(theme: str, palette: str) -> None:
    palette_colors = colors(SELECTORS[theme, palette])
    rising = [contrast(palette_colors["--panel"], palette_colors[f"--seq-{i}"]) for i in range(16)]
    assert rising == sorted(rising)
    assert rising[0] == 1
    assert rising[15] > 2.4
    below = [contrast(palette_colors["--panel"], palette_colors[f"--div-{i}"]) for i in range(7, -1, -1)]
    above = [contrast(palette_colors["--panel"], palette_colors[f"--div-{i}"]) for i in range(8, 16)]
    assert below == sorted(below)
    assert above == sorted(above)


@pytest.mark.parametrize("kind", sorted(BLIND))
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_both_ends_of_the_safe_scale_differ_for_color_blind_readers(theme: str, kind: str) -> None:
    def seen(color: str) -> list[float]:
        light = linear(color)
        return [max(0.0, sum(a * b for a, b in zip(row, light, strict=True))) ** (1 / 2.2) for row in BLIND[kind]]

    palette_colors = colors(SELECTORS[theme, "safe"])
    apart = (
        sum(
            (a - b) ** 2 for a, b in zip(seen(palette_colors["--div-0"]), seen(palette_colors["--div-15"]), strict=True)
        )
        ** 0.5
    )
    assert apart > 0.4
