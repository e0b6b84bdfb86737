# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The picture of 'FP8 Report': a heat map of similarity per token, and latency bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from ..hosts.comfy_compare import Compared

WIDTH, MARGIN, ROW, CELLS_AT_MOST = 960, 20, 26, 154
INK, GREY, PAPER = (30, 30, 34), (120, 120, 128), (250, 250, 252)
PYTORCH, OCTAVO = (160, 160, 170), (40, 140, 90)
WORST, BEST = 1e-1, 1e-5  # distances 1 - cosine at the ends of the colour scale


def colour(distance: float) -> tuple[int, int, int]:
    """Green for `BEST` or less, through yellow, to red for `WORST` or more, by its logarithm."""
    if not distance < WORST:  # NaN too
        return (200, 40, 40)
    low, high = math.log(BEST), math.log(WORST)
    t = (math.log(max(distance, BEST)) - low) / (high - low)
    if t < 0.5:
        return (int(40 + 400 * t * 0.95), 160, 70)
    return (225, int(160 - 240 * (t - 0.5)), int(70 - 60 * (t - 0.5)))


def draw(rows: Sequence[Compared]) -> Tensor:
    """[1, H, W, 3] in 0..1: one row of cells and two bars for each prompt."""
    import numpy
    import torch
    from PIL import Image, ImageDraw, ImageFont

    height = 2 * MARGIN + 2 * ROW + len(rows) * (2 * ROW + 8) + ROW + len(rows) * (2 * ROW + 12)
    image = Image.new("RGB", (WIDTH, height), PAPER)
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(15)
    small = ImageFont.load_default(12)
    y = MARGIN

    def text(x: float, at: float, words: str, fill: Any = INK, face: Any = font) -> None:
        pen.text((x, at), words, fill=fill, font=face)

    text(MARGIN, y, "Similarity to PyTorch, token by token")
    _scale(pen, text, y + 2, small)
    y += ROW + 4
    for row in rows:
        text(MARGIN, y, _short(row.prompt), face=small)
        text(WIDTH - 330, y, f"mean {row.token_mean:.5f}  min {row.token_min:.5f}", GREY, small)
        y += ROW - 8
        tokens = row.tokens[:CELLS_AT_MOST]
        cell = (WIDTH - 2 * MARGIN) / max(77, len(tokens))
        for i, cosine in enumerate(tokens):
            x = MARGIN + i * cell
            pen.rectangle((x, y, x + cell - 1, y + ROW - 4), fill=colour(1 - cosine))
        y += ROW + 16
    y += 8
    text(MARGIN, y, "Milliseconds per prompt (median)")
    y += ROW
    longest = max(max(row.pytorch_ms, row.octavo_ms) for row in rows) or 1.0
    for row in rows:
        for name, ms, fill in (
            ("PyTorch", row.pytorch_ms, PYTORCH),
            ("Octavo", row.octavo_ms, OCTAVO),
        ):
            text(MARGIN, y, name, GREY, small)
            length = max(2.0, (WIDTH - 2 * MARGIN - 240) * ms / longest)
            pen.rectangle((MARGIN + 70, y, MARGIN + 70 + length, y + ROW - 10), fill=fill)
            text(MARGIN + 78 + length, y, f"{ms:.2f} ms", face=small)
            y += ROW - 4
        y += 16
    pixels = numpy.asarray(image, dtype=numpy.float32) / 255.0
    return torch.from_numpy(pixels)[None]


def _scale(pen: Any, text: Any, y: float, font: Any) -> None:
    """The colour scale, best to worst, at the right."""
    left, steps = WIDTH - 330, 60
    for i in range(steps):
        distance = BEST * (WORST / BEST) ** (i / (steps - 1))
        pen.rectangle((left + 70 + i * 2, y, left + 72 + i * 2, y + 12), fill=colour(distance))
    text(left, y - 2, f"{1 - BEST:.5f}", GREY, font)
    text(left + 198, y - 2, f"{1 - WORST:.1f}", GREY, font)


def _short(prompt: str, limit: int = 80) -> str:
    plain = " ".join(prompt.split()) or "(empty)"
    # The built-in font knows Latin letters only.
    plain = plain.encode("latin-1", "replace").decode("latin-1")
    return plain if len(plain) <= limit else plain[: limit - 3] + "..."
