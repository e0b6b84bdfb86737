# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Full-size encoders with seeded weights, for the demo, the tests and the benchmarks.

Real weights cannot be shipped. These have CLIP's own initialisation (transformers'
`CLIPPreTrainedModel._init_weights`) and, in every layer norm, the few channels with a large gain
that trained CLIP and T5 show and that per-tensor FP8 has to live with. What is measured on them
says nothing about the quality of a trained encoder.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .encoders.clip import POSITIONS, PROJECTION, TOKENS, ClipSpec

CLIP_L = ClipSpec(12, 768, 3072, 12, 77, 49408, "quick_gelu")
CLIP_H = ClipSpec(24, 1024, 4096, 16, 77, 49408, "gelu")
CLIP_G = ClipSpec(32, 1280, 5120, 20, 77, 49408, "gelu")
LONG_CLIP_L = ClipSpec(12, 768, 3072, 12, 248, 49408, "quick_gelu")
TINY = ClipSpec(2, 128, 256, 2, 77, 49408, "quick_gelu")

OUTLIER_CHANNELS = 6
OUTLIER_GAIN = 12.0


def seeded_tensors(
    spec: ClipSpec,
    *,
    seed: int = 0,
    outliers: bool = True,
    projection: bool = True,
    dtype: torch.dtype = torch.float16,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (canonical name, tensor), one tensor at a time in a fixed order; `seed` sets values."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=random) * std).to(dtype)

    d = spec.width
    yield TOKENS, normal(spec.vocabulary, d, std=0.02)
    yield POSITIONS, normal(spec.positions, d, std=0.02)
    depth = (2 * spec.layers) ** -0.5
    stds = {
        "q_proj": d**-0.5 * depth,
        "k_proj": d**-0.5 * depth,
        "v_proj": d**-0.5 * depth,
        "out_proj": d**-0.5,
        "fc1": (2 * d) ** -0.5,
        "fc2": d**-0.5 * depth,
    }
    for name, (out, inner) in spec.linears().items():
        yield name + ".weight", normal(out, inner, std=stds[name.rsplit(".", 1)[1]])
        yield name + ".bias", normal(out, std=0.02)
    for name in spec.norms():
        gain = 1.0 + torch.randn(d, generator=random) * 0.1
        if outliers:
            gain[torch.randperm(d, generator=random)[:OUTLIER_CHANNELS]] = OUTLIER_GAIN
        yield name + ".weight", gain.to(dtype)
        yield name + ".bias", normal(d, std=0.02)
    if projection:
        yield PROJECTION, normal(d, d, std=d**-0.5)
