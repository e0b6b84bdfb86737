# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Run the Triton kernels in Triton's interpreter, on a CPU, against PyTorch's own operations.

    TRITON_INTERPRET=1 python tests/backends/interpreted_kernels.py

Prints one JSON line per case: how alike the last states are. A process of its own, because Triton
reads the variable when the kernels are made. Three things are not the kernels' and are put right or
stand in here: the interpreter's conversion to E4M3 (3.9 forgets the carry out of a mantissa; a GPU
rounds to nearest even, and so does torch), its product of BF16 (of the bits, as if they were
integers), and cuBLASLt's product, which a CPU does not have.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import octavo.backends.triton_kernels as kernels
from fp8_weights import random_embeds, t5_embeds, t5_weights, tiny_weights
from octavo.backends import fp8_ops
from octavo.backends.fp8_ops import DeviceWeights, Fp8Ops, Fp8Weights
from octavo.encoders import T5Spec, encode
from octavo.seeded import TINY, seeded_tensors
from triton.runtime import interpreter

T5 = T5Spec(2, 256, 384, 2, 64, 1000)
CPU = torch.device("cpu")
TYPES = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}
_convert_float = interpreter._convert_float


def convert_float(values: Any, source: Any, target: Any, rounding: Any) -> Any:
    if "fp8e4nv" not in (source.name, target.name):
        return _convert_float(values, source, target, rounding)
    found = torch.frombuffer(bytearray(values.tobytes()), dtype=TYPES[source.name])
    bits = found.to(TYPES[target.name]).view(torch.uint8).numpy()
    return bits.view(getattr(np, f"uint{target.primitive_bitwidth}")).copy().reshape(values.shape)


_create_dot = interpreter.InterpreterBuilder.create_dot


def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
    if a.dtype.name != "bf16":
        return _create_dot(self, a, b, *others)
    wide = [(x.data.astype(np.uint32) << 16).view(np.float32) for x in (a, b)]
    handles = [interpreter.TensorHandle(x, triton.language.float32) for x in wide]
    return _create_dot(self, *handles, *others)


def scaled_mm(
    a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype,
    bias: Tensor | None = None, use_fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    y = (a.float() @ b.float()) * scale_a * scale_b
    return (y if bias is None else y + bias).to(out_dtype)


def compare(
    name: str, weights: Fp8Weights, embeds: Tensor, mask: Tensor | None, exact: bool = True
) -> None:
    limits = fp8_ops.EXACT_ROWS
    try:
        fp8_ops.EXACT_ROWS = limits if exact else ()
        held = DeviceWeights(weights, CPU)
    finally:
        fp8_ops.EXACT_ROWS = limits
    results = []
    for ops in (Fp8Ops(held, simulated=True), kernels.FusedOps(held)):
        hidden, last = encode(ops, weights.spec, embeds, mask)
        results.append([*map(ops.tensor, hidden), ops.tensor(last)])
    tokens = [
        F.cosine_similarity(a.double(), b.double(), dim=-1) for a, b in zip(*results, strict=True)
    ]
    found = {
        "case": name,
        "mean": min(float(t.mean()) for t in tokens),
        "first": float(tokens[0].min()),
        "finite": all(bool(t.isfinite().all()) for t in results[1]),
        "dtypes": [str(t.dtype) for t in results[1]] == [str(t.dtype) for t in results[0]],
    }
    print(json.dumps(found), flush=True)


def activations() -> None:
    """The kernels' activations in FP32, from the tails to infinity, against PyTorch's in FP64."""
    ends = torch.tensor([0.0, 1e-3, 90.0, 3e4, torch.nan, torch.inf])
    x = torch.cat((torch.linspace(-12, 12, 4090), ends))
    for kind in ("quick_gelu", "gelu", "gelu_tanh", "relu"):
        out = torch.empty_like(x)
        kernels._activation[(4,)](
            x, None, out, x.numel(), BLOCK=1024, KIND=kind, QUANTIZED=False, num_warps=4
        )
        error = (out.double() - fp8_ops._activated(x.double(), kind)).abs()
        print(
            json.dumps(
                {
                    "case": kind,
                    "error": float(error[:-2].max()),
                    "tail": float(error[:2048].max()),
                    "infinite": bool(out[-1] == torch.inf),
                    "nan": bool(out[-2].isnan()),
                }
            ),
            flush=True,
        )


def main() -> None:
    activations()
    interpreter._convert_float = convert_float
    interpreter.InterpreterBuilder.create_dot = create_dot
    torch._scaled_mm = scaled_mm  # type: ignore[assignment]
    embeds = random_embeds(TINY, 2)[:, :20].half().contiguous()
    for exact in (True, False):
        compare(f"clip exact={exact}", tiny_weights(), embeds[:1], None, exact)
    mask = torch.arange(20)[None] < torch.tensor([[20], [9]])
    compare("clip masked", tiny_weights(), embeds, mask)
    compare("clip mixed", tiny_weights("fp8-mixed"), embeds[:1], None)
    compare("clip whole", tiny_weights(), random_embeds(TINY, 1).half(), None)
    specs = {
        "t5": T5,
        "umt5": replace(T5, bias_per_layer=True),
        "plain t5": replace(T5, gated=False, activation="relu"),
        "wide t5": replace(T5, head_dim=128),
    }
    for name, spec in specs.items():
        tensors = dict(seeded_tensors(spec, outliers=False))
        weights = t5_weights(spec, tensors)
        for tokens in (1, 70) if name == "t5" else (20,):
            x = t5_embeds(spec, tensors, 2, tokens)
            mask = torch.arange(tokens)[None] < torch.tensor([[tokens], [(tokens + 1) // 2]])
            compare(f"{name} {tokens} masked", weights, x, mask)
        if name == "t5":
            mask = torch.zeros(2, 20, dtype=torch.bool)
            for tokens in (20, 192, 200):  # one block of queries; two, with whole blocks of keys
                compare(f"t5 {tokens}", weights, t5_embeds(spec, tensors, 2, tokens), None)
            compare("t5 nothing to attend to", weights, t5_embeds(spec, tensors, 2, 20), mask)
            mixed = t5_weights(spec, tensors, "bf16")
            compare("t5 bf16", mixed, t5_embeds(spec, tensors, 1, 20), None)


if __name__ == "__main__":
    main()
