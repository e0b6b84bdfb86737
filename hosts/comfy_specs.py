# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's text models, CLIP and T5: their specs, and which of their parts an engine replaces."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import comfy.clip_model
import comfy.text_encoders.t5
import torch
from torch import nn

from ..encoders import ClipSpec, EncoderSpec, T5Spec
from ..encoders.clip import POSITIONS


def spec_of(transformer: Any) -> EncoderSpec | str:
    """The spec of a CLIP or T5 text model, or why it is none, in half a sentence."""
    clip, t5 = comfy.clip_model, comfy.text_encoders.t5
    forward = type(transformer).forward
    inner = getattr(transformer, "text_model", None)
    if forward is clip.CLIPTextModel.forward and type(inner) is clip.CLIPTextModel_:
        return _clip(inner)
    inner = getattr(transformer, "encoder", None)
    if forward is t5.T5.forward and type(inner) is t5.T5Stack:
        return _t5(transformer)
    return f"a {type(transformer).__name__}, which Octavo does not accelerate yet"


def _clip(inner: Any) -> ClipSpec | str:
    layers = inner.encoder.layers
    first = layers[0]
    known = comfy.clip_model.ACTIVATIONS
    kind: Literal["quick_gelu", "gelu"]
    if first.mlp.activation is known["quick_gelu"]:
        kind = "quick_gelu"
    elif first.mlp.activation is known["gelu"]:
        kind = "gelu"
    else:
        return "a CLIP with an activation that Octavo does not know"
    norms = {layer.layer_norm1.eps for layer in layers} | {inner.final_layer_norm.eps}
    if len(norms) != 1:
        return "a CLIP whose layer norms differ in eps"
    tokens, positions = inner.embeddings.token_embedding, inner.embeddings.position_embedding
    return ClipSpec(
        layers=len(layers),
        width=tokens.weight.shape[1],
        feed_forward=first.mlp.fc1.weight.shape[0],
        heads=first.self_attn.heads,
        positions=positions.weight.shape[0],
        vocabulary=tokens.weight.shape[0],
        activation=kind,
        layer_norm_eps=norms.pop(),
    )


def _t5(transformer: Any) -> T5Spec | str:
    stack, known = transformer.encoder, comfy.text_encoders.t5.activations
    parts = [(block.layer[0], block.layer[-1]) for block in stack.block]
    attentions = [attention.SelfAttention for attention, _ in parts]
    biased = [attention.relative_attention_bias is not None for attention in attentions]
    every = len(biased) > 1 and all(biased)
    if not biased or not (every or biased == [True] + [False] * (len(biased) - 1)):
        return "a T5 whose relative biases are not T5's or umT5's"
    first, dense = attentions[0], parts[0][1].DenseReluDense
    gated = hasattr(dense, "wi_0")
    kinds = {id(part.DenseReluDense.act) for _, part in parts}
    kind: Literal["gelu_tanh", "relu"]
    if kinds == {id(known["gelu_pytorch_tanh"])}:
        kind = "gelu_tanh"
    elif kinds == {id(known["relu"])}:
        kind = "relu"
    else:
        return "a T5 with an activation that Octavo does not know"
    norms = {part.layer_norm.variance_epsilon for both in parts for part in both}
    norms.add(stack.final_layer_norm.variance_epsilon)
    if len(norms) != 1:
        return "a T5 whose norms differ in eps"
    vocabulary, width = transformer.shared.weight.shape
    return T5Spec(
        layers=len(parts),
        width=width,
        feed_forward=(dense.wi_0 if gated else dense.wi).weight.shape[0],
        heads=first.num_heads,
        head_dim=first.q.weight.shape[0] // first.num_heads,
        vocabulary=vocabulary,
        gated=gated,
        activation=kind,
        bias_per_layer=every,
        buckets=first.relative_attention_num_buckets,
        max_distance=first.relative_attention_max_distance,
        norm_eps=norms.pop(),
    )


def inner_of(transformer: Any) -> nn.Module:
    """The part that runs the blocks: nobody calls it while an engine answers."""
    found = transformer.encoder if is_t5(transformer) else transformer.text_model
    assert isinstance(found, nn.Module)
    return found


def still_read(transformer: Any) -> tuple[nn.Module, ...]:
    """What ComfyUI itself, or the seam for it, runs at each prompt beside an engine."""
    if is_t5(transformer):
        return (transformer.shared,)
    return (
        transformer.text_model.embeddings.token_embedding,
        transformer.text_model.final_layer_norm,
        transformer.text_projection,
    )


def inside(spec: EncoderSpec) -> tuple[str, ...]:
    """Starts of the names of what an engine alone reads while it serves."""
    if isinstance(spec, T5Spec):
        return ("encoder.",)
    return ("text_model.encoder.", POSITIONS)


def is_t5(transformer: Any) -> bool:
    return isinstance(transformer, comfy.text_encoders.t5.T5)


def kind_of(spec: EncoderSpec) -> str:
    """What people call it."""
    return "T5" if isinstance(spec, T5Spec) else "CLIP"


@cache
def half_bytes(spec: EncoderSpec) -> int:
    """What PyTorch keeps for it in 16 bit, without the token table that stays in use."""
    table = spec.token_table
    sizes = (torch.Size(shape).numel() for name, shape in spec.tensors().items() if name != table)
    return 2 * sum(sizes)


def reads_scales(spec: EncoderSpec) -> bool:
    """Whether ComfyUI's loaders read the FP8 scales of a file with such an encoder.

    They do where comfy/sd.py `detect_te_model` says T5_XXL, which umT5-XXL is to it too; its
    loaders of CLIP and of the smaller T5 take the codes for weights.
    """
    return isinstance(spec, T5Spec) and (spec.layers, spec.feed_forward, spec.gated) == (
        24, 10240, True,
    )  # fmt: skip
