# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Full-size encoders with seeded weights, for the demo, the tests and the benchmarks.

Real weights cannot be shipped. These have the encoder's own initialisation (transformers'
`CLIPPreTrainedModel._init_weights`; `T5PreTrainedModel._init_weights`, with what is written to the
residual stream scaled by depth as CLIP's) and, in every norm, the few channels with a large gain
that trained CLIP and T5 show and that per-tensor FP8 has to live with. T5 has besides what its
training makes and fp16 cannot hold: a few channels of the residual stream that grow far beyond the
others, and a few channels of the feed-forward that do. What is measured on them says nothing about
the quality of a trained encoder.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .encoders import ClipSpec, EncoderSpec, T5Spec
from .encoders.clip import POSITIONS, PROJECTION, TOKENS

CLIP_L = ClipSpec(12, 768, 3072, 12, 77, 49408, "quick_gelu")
CLIP_H = ClipSpec(24, 1024, 4096, 16, 77, 49408, "gelu")
CLIP_G = ClipSpec(32, 1280, 5120, 20, 77, 49408, "gelu")
LONG_CLIP_L = ClipSpec(12, 768, 3072, 12, 248, 49408, "quick_gelu")
TINY = ClipSpec(2, 128, 256, 2, 77, 49408, "quick_gelu")

T5_XXL = T5Spec(24, 4096, 10240, 64, 64, 32128)
UMT5_XXL = T5Spec(24, 4096, 10240, 64, 64, 256384, bias_per_layer=True)
T5_TINY = T5Spec(2, 128, 256, 2, 64, 32128)

OUTLIER_CHANNELS = 6
OUTLIER_GAIN = 12.0
RESIDUAL_OUTLIER = 40.0  # T5: how much larger its feed-forward writes a few channels of the stream
OVERFLOW = 4096.0


def seeded_tensors(
    spec: EncoderSpec,
    *,
    seed: int = 0,
    outliers: bool = True,
    projection: bool = True,
    overflow: bool = False,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (canonical name, tensor), one tensor at a time in a fixed order; `seed` sets values.

    `projection` concerns CLIP alone and `overflow` T5 alone: its residual stream and the input of
    its `wo` are 4096 times as large and pass 65504, what fp16 holds. The final state stays the same
    but for the norms' epsilon, since every norm divides by what it is given. Each kind of `device`
    has other values.
    """
    random = torch.Generator(device).manual_seed(seed)
    if isinstance(spec, T5Spec):
        return _t5(spec, random, outliers, overflow, dtype)
    return _clip(spec, random, outliers, projection, dtype)


def _clip(
    spec: ClipSpec, random: torch.Generator, outliers: bool, projection: bool, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    def normal(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=random, device=random.device) * std).to(dtype)

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
        gain = 1.0 + torch.randn(d, generator=random, device=random.device) * 0.1
        if outliers:
            gain[torch.randperm(d, generator=random, device=random.device)[:OUTLIER_CHANNELS]] = (
                OUTLIER_GAIN
            )
        yield name + ".weight", gain.to(dtype)
        yield name + ".bias", normal(d, std=0.02)
    if projection:
        yield PROJECTION, normal(d, d, std=d**-0.5)


def _t5(
    spec: T5Spec, random: torch.Generator, outliers: bool, overflow: bool, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=random, device=random.device) * std

    def channels(size: int) -> torch.Tensor:
        return torch.randperm(size, generator=random, device=random.device)[:OUTLIER_CHANNELS]

    d, f, scale = spec.width, spec.feed_forward, OVERFLOW if overflow else 1.0
    stream = channels(d)  # the same in every block, as in trained T5
    yield spec.token_table, normal(spec.vocabulary, d, std=scale).to(dtype)
    for name in spec.bias_tables():
        # Its initialisation is next to nothing; trained biases decide where a head looks.
        yield name, normal(spec.buckets, spec.heads, std=1.0).to(dtype)
    inner = spec.heads * spec.head_dim
    # T5's own initialisation lets the stream grow with depth and so every error; training does not.
    depth = (2 * spec.layers) ** -0.5
    stds = {
        "q": (d * spec.head_dim) ** -0.5,
        "k": d**-0.5,
        "v": d**-0.5,
        "o": inner**-0.5 * scale * depth,
        "wi": d**-0.5 * scale,
        "wi_0": d**-0.5,
        "wi_1": d**-0.5 * scale,
        "wo": f**-0.5 * depth,
    }
    for name, (out, width) in spec.linears().items():
        leaf = name.rsplit(".", 1)[1]
        weight = normal(out, width, std=stds[leaf])
        if outliers and leaf == "wo":
            weight[stream] *= RESIDUAL_OUTLIER
        if outliers and leaf in ("wi", "wi_1"):
            weight[channels(f)] *= OUTLIER_GAIN
        yield name + ".weight", weight.to(dtype)
    for name in spec.norms():
        gain = 1.0 + torch.randn(d, generator=random, device=random.device) * 0.1
        if outliers:
            gain[stream] /= RESIDUAL_OUTLIER  # trained gains are small where the stream is large
            gain[channels(d)] = OUTLIER_GAIN
        yield name + ".weight", gain.to(dtype)
