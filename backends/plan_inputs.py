# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's tensors as the weight inputs of a shared plan (backends/onnx_ops.py).

A LoRA or another checkpoint is another set of these under the same plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..checkpoints.quantized import Structure
from ..encoders import EncoderSpec
from ..errors import QuantizationError
from .onnx_ops import (
    Body,
    EmbeddedWeights,
    activation_exponent,
    fused_name,
    weight_scale_unit,
    wide,
)
from .torch_ops import tables

if TYPE_CHECKING:
    from ..checkpoints.quantized import QuantizedCheckpoint

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def gemms(
    spec: EncoderSpec, structure: Structure, *, fused: bool, block: int | None = None
) -> dict[str, tuple[str, ...]]:
    """GEMM name in the graph -> the linears it computes, side by side along the output axis."""
    groups: dict[str, tuple[str, ...]] = {}
    for i in range(spec.layers) if block is None else (block,):
        for names in spec.groups(i):
            if fused and len(names) > 1 and len({structure[n] for n in names}) == 1:
                groups[fused_name(names)] = names
            else:
                groups |= {n: (n,) for n in names}
    return groups


def gemm_scales(
    inner: int, input_scale: Tensor, weight_scales: Tensor, body: Body
) -> tuple[Tensor, Tensor]:
    """(pre_scale [1], post_scale like `weight_scales`) in `body`, for the fixed units of the graph.

    The post-scale undoes the *rounded* pre-scale, so rounding costs no accuracy. Raises
    `QuantizationError` where a scale leaves the normal range of `body`.
    """
    dtype = _DTYPES[body]
    pre = (2.0 ** -activation_exponent(inner) / input_scale.float().reshape(1)).to(dtype)
    post = (weight_scales.float() / weight_scale_unit() / pre.float()).to(dtype)
    tiny = torch.finfo(dtype).tiny
    for scale in (pre, post):
        outside = scale[~(scale.isfinite() & (scale >= tiny))]
        if outside.numel():
            raise QuantizationError(
                f"a scale ({outside[0].item():.3g}) is outside the range of {body}, "
                "so no plan can hold it; use another recipe (bf16) or PyTorch for this encoder."
            )
    return pre, post


def plan_weights(
    spec: EncoderSpec,
    structure: Structure,
    read: Callable[[str], Tensor],
    body: Body,
    *,
    fused: bool = True,
    block: int | None = None,
) -> dict[str, Tensor]:
    """Graph weight name -> tensor; `read` gives tensors under their names in a checkpoint file.

    `block`: the weights of that block's graph alone (`onnx_ops.emit_block`, T5).

    FP8 weights keep their dtype; everything else is in `body`, but T5's norms and scales, which are
    FP32. Raises `QuantizationError` for values that their dtype cannot hold and for scales that are
    missing, not positive, or differ between linears that share one input.
    """

    def rounded(name: str, tensor: Tensor, dtype: Body = body) -> Tensor:
        small = tensor.to(_DTYPES[dtype]).contiguous()
        if not bool(small.isfinite().all()):
            raise QuantizationError(
                f"{name} holds values outside the range of {dtype}, so no plan can hold it; "
                "the next engine is used."
            )
        return small

    stream = wide(spec, body)
    weights = {name: rounded(name, read(name)) for name in tables(spec, block)}
    prefix = "" if block is None else spec.block(block)
    for norm in (n for n in spec.norms() if n.startswith(prefix)):
        for part in (".weight", ".bias")[: 1 + spec.biased]:
            weights[norm + part] = rounded(norm + part, read(norm + part), stream)
    sizes = spec.linears()
    for name, linears in gemms(spec, structure, fused=fused, block=block).items():
        stacked = [read(n + ".weight") for n in linears]
        weight = torch.cat(stacked) if len(stacked) > 1 else stacked[0]
        if spec.biased:
            bias = torch.cat([read(n + ".bias") for n in linears])
            weights[name + ".bias"] = rounded(name + ".bias", bias)
        if structure[linears[0]] != "fp8":
            weights[name + ".weight"] = rounded(name + ".weight", weight)
            continue
        weights[name + ".weight"] = weight.contiguous()
        input_scales = torch.stack([_positive(read, n + ".input_scale") for n in linears])
        if not bool((input_scales == input_scales[0]).all()):
            raise QuantizationError(
                f"{name}: its parts have different input scales, which one GEMM cannot hold."
            )
        columns = torch.cat(
            [_positive(read, n + ".weight_scale").expand(sizes[n][0]) for n in linears]
        )
        pre, post = gemm_scales(sizes[linears[0]][1], input_scales[0], columns, stream)
        weights[name + ".pre_scale"], weights[name + ".post_scale"] = pre, post
    return weights


def _positive(read: Callable[[str], Tensor], name: str) -> Tensor:
    try:
        scale = read(name)
    except KeyError as error:
        raise QuantizationError(f"{name} is missing; quantize the encoder again.") from error
    if scale.numel() != 1 or not (bool(scale.isfinite().all()) and bool((scale > 0).all())):
        raise QuantizationError(
            f"{name} is {scale.tolist()}; a scale must be one finite and positive number."
        )
    return scale.float().reshape(())


def embedded_weights(checkpoint: QuantizedCheckpoint, body: Body) -> EmbeddedWeights:
    """What an embedded graph needs: large weights by their place in the checkpoint's file.

    FP8 weights lie there byte for byte as the graph wants them, and so do 16-bit ones of the body's
    dtype; everything else is a value in the graph.
    """
    weights = plan_weights(
        checkpoint.spec, checkpoint.structure, checkpoint.read, body, fused=False
    )
    external, values = {}, {}
    for name, tensor in weights.items():
        linear = name.removesuffix(".weight")
        as_stored = linear in checkpoint.structure and linear != name
        if as_stored and checkpoint.read(name).dtype == tensor.dtype:
            external[name] = name
        else:
            values[name] = tensor.float().numpy()
    file = checkpoint.path.name
    return EmbeddedWeights(file, external, checkpoint.locations(), values)
