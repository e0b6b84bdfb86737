# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""CLIP's text encoder (Radford et al. 2021, arXiv:2103.00020): L, H, G, LongCLIP, any size."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from .ops import Activation, Ops, T

TOKENS = "text_model.embeddings.token_embedding.weight"
POSITIONS = "text_model.embeddings.position_embedding.weight"
FINAL_NORM = "text_model.final_layer_norm"
PROJECTION = "text_projection.weight"
HEAD_DIM = 64  # every published CLIP text tower; a config may say otherwise

START_TOKEN = 49406
END_TOKEN = 49407

Family = Literal["clip_l", "clip_h", "clip_g", "long_clip_l", "clip"]
_FAMILIES: dict[tuple[int, int, int], Family] = {
    (768, 12, 77): "clip_l",
    (768, 12, 248): "long_clip_l",
    (1024, 24, 77): "clip_h",  # OpenCLIP ViT-H/14; SD2 ships it with 23 or 24 layers
    (1024, 23, 77): "clip_h",
    (1280, 32, 77): "clip_g",
}


@dataclass(frozen=True)
class ClipSpec:
    """Everything about a CLIP text tower but its weights. Sizes are element counts."""

    layers: int
    width: int
    feed_forward: int
    heads: int
    positions: int
    vocabulary: int
    activation: Activation
    layer_norm_eps: float = 1e-5

    @property
    def family(self) -> Family:
        return _FAMILIES.get((self.width, self.layers, self.positions), "clip")

    @property
    def pad_token(self) -> int:
        """What hosts fill rows up with: OpenAI's CLIP repeats the end token, OpenCLIP writes 0."""
        return END_TOKEN if self.activation == "quick_gelu" else 0

    @property
    def token_table(self) -> str:
        """Name of the token embeddings, which stay in the host."""
        return TOKENS

    @property
    def longest(self) -> int:
        """The most tokens that an engine takes."""
        return self.positions

    @property
    def biased(self) -> bool:
        """Whether linears and norms have a `.bias`."""
        return True

    def facts(self) -> dict[str, object]:
        """Canonical, JSON-ready facts; part of every key. A new field must be added here too."""
        return {"encoder": "clip", **asdict(self)}

    def block(self, index: int) -> str:
        """Prefix of the names of block `index`, counted from 0."""
        return f"text_model.encoder.layers.{index}."

    def linears(self) -> dict[str, tuple[int, int]]:
        """Name (without `.weight`) -> (out, in) of every linear of the tower, in program order."""
        d, f = self.width, self.feed_forward
        sizes = {
            "self_attn.q_proj": (d, d),
            "self_attn.k_proj": (d, d),
            "self_attn.v_proj": (d, d),
            "self_attn.out_proj": (d, d),
            "mlp.fc1": (f, d),
            "mlp.fc2": (d, f),
        }
        return {
            self.block(i) + leaf: size for i in range(self.layers) for leaf, size in sizes.items()
        }

    def groups(self, index: int) -> list[tuple[str, ...]]:
        """The linears of block `index`, those that share one input together, in program order."""
        block = self.block(index)
        qkv = tuple(f"{block}self_attn.{n}_proj" for n in "qkv")
        return [qkv, *((block + n,) for n in ("self_attn.out_proj", "mlp.fc1", "mlp.fc2"))]

    def norms(self) -> list[str]:
        """Name (without `.weight`) of every layer norm, in program order."""
        per_block = ("layer_norm1", "layer_norm2")
        return [self.block(i) + n for i in range(self.layers) for n in per_block] + [FINAL_NORM]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape of every tensor of the tower (the projection is apart)."""
        shapes: dict[str, tuple[int, ...]] = {
            TOKENS: (self.vocabulary, self.width),
            POSITIONS: (self.positions, self.width),
        }
        for name, (out, inner) in self.linears().items():
            shapes[name + ".weight"] = (out, inner)
            shapes[name + ".bias"] = (out,)
        for name in self.norms():
            shapes[name + ".weight"] = shapes[name + ".bias"] = (self.width,)
        return shapes


def encode(ops: Ops[T], spec: ClipSpec, embeds: T, mask: T | None = None) -> tuple[list[T], T]:
    """Token embeddings [B, S, C] -> (L+1 hidden states, the final normed state), all [B, S, C].

    `hidden[0]` is embeddings plus positions and `hidden[i]` the output of block i, as transformers'
    `hidden_states`. `mask` [B, S] is True where a key may be attended to; attention is causal.
    """
    x = ops.add_positions(embeds, POSITIONS)
    hidden = [x]
    for i in range(spec.layers):
        x = block(ops, spec, i, x, mask)
        hidden.append(x)
    return hidden, ops.layer_norm(x, FINAL_NORM, spec.layer_norm_eps)


def block(ops: Ops[T], spec: ClipSpec, index: int, x: T, mask: T | None = None) -> T:
    """Block `index` alone: the residual stream [B, S, C] before it -> after it."""
    prefix = spec.block(index)
    qkv, (out_proj,), (fc1,), (fc2,) = spec.groups(index)
    y = ops.layer_norm(x, prefix + "layer_norm1", spec.layer_norm_eps)
    q, k, v = ops.linears(y, qkv)
    y = ops.attention(q, k, v, heads=spec.heads, mask=mask)
    x = ops.add(x, ops.linear(y, out_proj))
    y = ops.layer_norm(x, prefix + "layer_norm2", spec.layer_norm_eps)
    y = ops.activation(ops.linear(y, fc1), spec.activation)
    return ops.add(x, ops.linear(y, fc2))
