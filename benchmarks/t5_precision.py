# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""What each part of a T5 may lose: FP8 here and 16 bit there, on full-size outlier weights.

    .venv/bin/python benchmarks/t5_precision.py MODEL.safetensors [--held-out 8] [--layers 24]

MODEL is a T5-XXL in one file; benchmarks/build.py writes a seeded one with outlier channels. Each
row is the FP32 reference with the roundings of one choice, block by block in one pass over the
file, against FP32 on held-out prompts; the input ranges are those of the calibration prompts. The
choices in the recipes (recipes/*.toml) and in the graph (backends/onnx_ops.py) come from this
table. Writes results/t5-precision.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from octavo import prompts
from octavo.backends.amax import AmaxRecorder
from octavo.backends.torch_ops import StreamedOps, embed_tokens
from octavo.checkpoints import detect
from octavo.checkpoints.quantized import scale_from_amax, to_fp8
from octavo.encoders import T5Spec, block
from octavo.encoders.t5 import FINAL_NORM
from torch import Tensor

RESULTS = Path(__file__).parent / "results" / "t5-precision.md"
LENGTH = 77


@dataclass(frozen=True)
class Choice:
    """`fp8(leaf, block, blocks)`: whether that linear is FP8; dtypes of the stream, attention."""

    what: str
    fp8: Callable[[str, int, int], bool]
    stream: torch.dtype = torch.float32
    attention: torch.dtype = torch.bfloat16


def _outer(_: str, i: int, n: int) -> bool:
    return 0 < i < n - 1


CHOICES = (
    Choice("every linear FP8", lambda *_: True),
    Choice("every linear FP8, attention FP32", lambda *_: True, attention=torch.float32),
    Choice("every linear FP8, residual stream bf16", lambda *_: True, stream=torch.bfloat16),
    Choice("wo in 16 bit", lambda leaf, *_: leaf != "wo"),
    Choice("o in 16 bit", lambda leaf, *_: leaf != "o"),
    Choice("wo and o in 16 bit", lambda leaf, *_: leaf not in ("wo", "o")),
    Choice("first and last block in 16 bit", _outer),
    Choice("every linear bf16", lambda *_: False),
    Choice("every linear bf16, residual stream bf16", lambda *_: False, stream=torch.bfloat16),
)


class RoundingOps(StreamedOps):
    """The reference with the roundings of one choice in one block."""

    def __init__(
        self, read: Callable[[str], Tensor], choice: Choice, index: int, layers: int,
        codes: Mapping[str, Tensor], amax: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        super().__init__(read, "cpu", biased=False)
        self.choice, self.place, self.codes, self.amax = choice, (index, layers), codes, amax

    def _linear(self, x: Tensor, name: str) -> Tensor:
        if not self.choice.fp8(name.rsplit(".", 1)[1], *self.place):
            weight = self._weight(name + ".weight").bfloat16().float()
            return F.linear(x.bfloat16().float(), weight).bfloat16().float()
        scale = scale_from_amax(self.amax[name], name)
        return F.linear(to_fp8(x, scale).float() * scale, self.codes[name])

    def biased_attention(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, heads: int, mask: Tensor | None
    ) -> Tensor:
        q, k, v, bias = (t.to(self.choice.attention).float() for t in (q, k, v, bias))
        y = super().biased_attention(q, k, v, bias, heads=heads, mask=mask)
        return y.to(self.choice.attention).float()

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return (a + b).to(self.choice.stream).float()


@torch.no_grad()
def measure(
    spec: T5Spec, read: Callable[[str], Tensor], held_out: int, calibration: int
) -> tuple[list[tuple[str, float, float]], dict[str, float]]:
    """(what, mean and least cosine) of each choice; largest input of each kind of linear."""
    table = spec.token_table
    rows = prompts.padded_t5(prompts.load_tokens("held_out", "t5")[:held_out], LENGTH)
    shown = prompts.load_tokens("calibration", "t5")[:calibration]
    exact = embed_tokens(read, rows, table)
    carried = [embed_tokens(read, batch, table) for batch in prompts.batched_t5(shown, 8)]
    states = {choice.what: exact for choice in CHOICES}
    largest: dict[str, float] = {}
    for index in range(spec.layers):
        start = time.monotonic()
        held: dict[str, Tensor] = {}

        def widened(name: str, held: dict[str, Tensor] = held) -> Tensor:
            if name not in held:
                held[name] = read(name).float()
            return held[name]

        recorder = AmaxRecorder()
        ops = StreamedOps(widened, "cpu", recorder, biased=False)
        carried = [block(ops, spec, index, x) for x in carried]
        exact = block(StreamedOps(widened, "cpu", biased=False), spec, index, exact)
        codes = {}
        for name in recorder.amax:
            weight = widened(name + ".weight")
            scale = scale_from_amax(weight.abs().amax(), name)
            codes[name] = to_fp8(weight, scale).float() * scale
        for choice in CHOICES:
            one = RoundingOps(widened, choice, index, spec.layers, codes, recorder.amax)
            states[choice.what] = block(one, spec, index, states[choice.what])
        for name, amax in recorder.amax.items():
            leaf = name.rsplit(".", 1)[1]
            largest[leaf] = max(largest.get(leaf, 0.0), float(amax))
        largest["residual stream"] = float(exact.abs().max())
        print(f"block {index}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
    gain = read(FINAL_NORM + ".weight").float()

    def final(x: Tensor) -> Tensor:
        return F.rms_norm(x, gain.shape, gain, spec.norm_eps)

    found = []
    for what, state in states.items():
        cosine = F.cosine_similarity(final(state).double(), final(exact).double(), dim=-1)
        found.append((what, float(cosine.mean()), float(cosine.min())))
    return found, largest


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--held-out", type=int, default=8)
    parser.add_argument("--calibration", type=int, default=64)
    parser.add_argument("--layers", type=int, help="only the first ones")
    options = parser.parse_args()
    (encoder,) = detect(options.model).encoders
    spec = encoder.spec
    assert isinstance(spec, T5Spec), "the file holds no T5"
    spec = replace(spec, layers=options.layers or spec.layers)
    found, largest = measure(spec, encoder.read, options.held_out, options.calibration)
    lines = [
        f"T5, {spec.layers} layers of width {spec.width}; {options.held_out} held-out prompts of "
        f"{LENGTH} tokens, {options.calibration} calibration prompts; torch {torch.__version__}",
        "",
        "| choice | token mean | token min |",
        "|---|---|---|",
        *(f"| {what} | {mean:.5f} | {least:.5f} |" for what, mean, least in found),
        "",
        "Largest input: " + ", ".join(f"{leaf} {value:.1f}" for leaf, value in largest.items()),
    ]
    print("\n".join(lines))
    if options.layers is None:
        RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
