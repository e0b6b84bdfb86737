# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of an emitted graph in PyTorch: the same operations, rounded alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from octavo.backends.onnx_ops import activation_exponent, fused_name, weight_scale_unit
from octavo.checkpoints.quantized import Structure, to_fp8
from octavo.encoders import Ops
from torch import Tensor

MASKED = -30000.0


class GraphOps(Ops[Tensor]):
    """`Ops` over the weights of `plan_weights`, each result rounded to `body` like a node's."""

    def __init__(
        self,
        structure: Structure,
        weights: Mapping[str, Tensor],
        body: torch.dtype = torch.float16,
        *,
        fused: bool = True,
    ) -> None:
        self.structure, self.body, self.fused = structure, body, fused
        self.weights = weights

    def rounded(self, x: Tensor) -> Tensor:
        return x.to(self.body)

    def weight(self, name: str) -> Tensor:
        return self.weights[name].float()

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return self.rounded(a.float() + b.float())

    def mul(self, a: Tensor, b: Tensor | float) -> Tensor:
        b = torch.as_tensor(b).to(self.body)  # a constant of the graph is in its body's dtype
        return self.rounded(a.float() * b.float())

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        return self.rounded(a.float() @ b.float())

    def add_positions(self, x: Tensor, name: str) -> Tensor:
        return self.add(x, self.weights[name])

    def gemm(self, x: Tensor, name: str, precision: str) -> Tensor:
        if precision == "16bit":
            y = self.matmul(x, self.weight(name + ".weight").T)
        else:
            codes, unit = self.quantized(x, name)
            w = self.rounded(self.weight(name + ".weight") * weight_scale_unit())
            y = self.matmul(self.rounded(codes.float() * unit), w.T)
            y = self.mul(y, self.weights[name + ".post_scale"])
        return self.add(y, self.weights[name + ".bias"])

    def quantized(self, x: Tensor, name: str) -> tuple[Tensor, float]:
        """(the FP8 codes of a GEMM's input, the fixed scale they stand for)."""
        unit = 2.0 ** -activation_exponent(x.shape[-1])
        return to_fp8(self.mul(x, self.weights[name + ".pre_scale"]), torch.tensor(unit)), unit

    def linear(self, x: Tensor, name: str) -> Tensor:
        return self.gemm(x, name, self.structure[name])

    def linears(self, x: Tensor, names: Sequence[str]) -> tuple[Tensor, ...]:
        kinds = {self.structure[name] for name in names}
        if not self.fused or len(kinds) > 1:
            return super().linears(x, names)
        return self.gemm(x, fused_name(names), kinds.pop()).chunk(len(names), dim=-1)

    def layer_norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        gain, bias = self.weight(name + ".weight"), self.weight(name + ".bias")
        return self.rounded(F.layer_norm(x.float(), gain.shape, gain, bias, eps))

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, heads: int, mask: Tensor | None
    ) -> Tensor:
        b, s, c = q.shape
        q, k, v = (t.view(b, s, heads, c // heads).transpose(1, 2) for t in (q, k, v))
        hidden = torch.full((s, s), MASKED).triu(1).to(self.body)
        if mask is not None:
            padding = torch.where(mask, 0.0, MASKED).to(self.body)
            hidden = self.add(hidden, padding[:, None, None, :])
        scores = self.matmul(self.mul(q, (c // heads) ** -0.5), k.transpose(-1, -2))
        weights = self.rounded(self.add(scores, hidden).float().softmax(-1))
        return self.matmul(weights, v).transpose(1, 2).reshape(b, s, c)

    def quick_gelu(self, x: Tensor) -> Tensor:
        return self.mul(x, self.rounded(self.mul(x, 1.702).float().sigmoid()))

    def gelu(self, x: Tensor) -> Tensor:
        return self.rounded(F.gelu(x.float()))


class RuntimeOps(GraphOps):
    """As ONNX Runtime runs an fp16 graph on a CPU: in FP32, rounding only what must lie in memory.

    That is what enters or leaves an operator with an fp16 kernel of its own: Quantize, LayerNorm,
    the moving of data around attention; and the graph's outputs (by the caller).
    """

    def rounded(self, x: Tensor) -> Tensor:
        return x

    def half(self, x: Tensor) -> Tensor:
        return x.to(self.body).float()

    def mul(self, a: Tensor, b: Tensor | float) -> Tensor:
        return a.float() * self.half(torch.as_tensor(b))

    def quantized(self, x: Tensor, name: str) -> tuple[Tensor, float]:
        unit = 2.0 ** -activation_exponent(x.shape[-1])
        x = self.half(self.mul(x, self.weights[name + ".pre_scale"]))
        return to_fp8(x, torch.tensor(unit)), unit

    def layer_norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        return self.half(super().layer_norm(self.half(x), name, eps))

    def linears(self, x: Tensor, names: Sequence[str]) -> tuple[Tensor, ...]:
        return tuple(self.half(y) for y in super().linears(x, names))

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, heads: int, mask: Tensor | None
    ) -> Tensor:
        return self.half(super().attention(q, k, v, heads=heads, mask=mask))
