# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""transformers' CLIP text models.

Up to transformers 5.5 the tower is `model.text_model`, from 5.6 on a CLIPTextModel is the tower
itself.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..accelerated import Hidden
from ..encoders import ClipSpec
from ..encoders.clip import END_TOKEN
from .encoder_call import Call
from .tower import Family, Unsupported, outputs
from .watch import Counting

VOCABULARY = END_TOKEN + 1  # textual inversion adds rows beyond; they stay in the module

_MODULE = "transformers.models.clip.modeling_clip"
_CLASSES = {_MODULE: ("CLIPTextModel", "CLIPTextModelWithProjection")}
_ACTIVATIONS: dict[str, Literal["quick_gelu", "gelu"]] = {
    "QuickGELUActivation": "quick_gelu",
    "GELUActivation": "gelu",
    "GELU": "gelu",
}


class Clip(Family):
    """CLIPTextModel and CLIPTextModelWithProjection."""

    classes = _CLASSES
    arguments = ("input_ids", "attention_mask", "position_ids")
    keeps_hidden = True
    parts = frozenset(_ACTIVATIONS)
    constants = frozenset(
        {"scale", "head_dim", "num_heads", "dropout", "eps", "approximate", "config"}
    )

    def core(self, module: Any) -> Any:
        """With `embeddings`, `encoder` and `final_layer_norm`."""
        return getattr(module, "text_model", module)

    def spec(self, module: Any) -> ClipSpec:
        core = self.core(module)
        layers = list(core.encoder.layers)
        tokens, positions = core.embeddings.token_embedding, core.embeddings.position_embedding
        norms = [n for layer in layers for n in (layer.layer_norm1, layer.layer_norm2)]
        eps = {norm.eps for norm in (*norms, core.final_layer_norm)}
        alike = {
            (
                type(layer.mlp.activation_fn).__name__,
                getattr(layer.mlp.activation_fn, "approximate", "none"),
                layer.self_attn.num_heads,
                layer.self_attn.head_dim,
                layer.self_attn.scale,
                layer.mlp.fc1.out_features,
            )
            for layer in layers
        }
        if len(alike) != 1 or len(eps) != 1:
            raise Unsupported("it has no layers, or they differ from each other")
        activation, approximate, heads, head_dim, scale, feed_forward = alike.pop()
        if activation not in _ACTIVATIONS or approximate != "none":
            raise Unsupported(f"its activation is {activation}, and CLIP's are quick_gelu and gelu")
        rows, width = tokens.weight.shape
        if heads * head_dim != width or scale != head_dim**-0.5:
            raise Unsupported("its attention is not CLIP's")
        if rows < VOCABULARY:
            raise Unsupported(f"its vocabulary has {rows} tokens, and CLIP's has {VOCABULARY}")
        return ClipSpec(
            len(layers), width, feed_forward, heads, positions.weight.shape[0], VOCABULARY,
            _ACTIVATIONS[activation], eps.pop(),
        )  # fmt: skip

    def leaf(self, module: Any, name: str) -> nn.Module:
        found: nn.Module = self.core(module).get_submodule(name.removeprefix("text_model."))
        return found

    def is_plain(self, name: str, leaf: nn.Module) -> bool:
        if "embedding" in name:
            return type(leaf) is nn.Embedding
        return type(leaf) is (nn.LayerNorm if "norm" in name else nn.Linear)

    def table(self, module: Any) -> Any:
        return self.core(module).embeddings.token_embedding

    def positions(self, module: Any) -> Counting:
        embeddings = self.core(module).embeddings
        return Counting(embeddings, "position_ids", len(embeddings.position_embedding.weight))

    def live(self, module: Any) -> list[nn.Module]:
        projection = getattr(module, "text_projection", None)
        return [*super().live(module), *([] if projection is None else [projection])]

    def parkable(self, module: Any) -> list[nn.Module]:
        core = self.core(module)
        return [*core.encoder.layers, core.embeddings.position_embedding, core.final_layer_norm]

    def output(
        self, model: Any, call: Call, hidden: Hidden, last: Tensor, dtype: torch.dtype
    ) -> Any:
        ids = call.ids
        eos_token = self.core(model).eos_token_id
        # As transformers pools: configs with end token 2 are older than its fix, which means argmax
        ends = (ids if eos_token == 2 else (ids == eos_token).int()).argmax(dim=-1)  # [B]
        if len(ids) > 1:
            ends = ends + torch.arange(0, ids.numel(), ids.shape[1], device=ends.device)
        last = last.to(dtype)
        pooled = last.flatten(0, 1).index_select(0, ends)  # [B, C]
        states = None
        if call.hidden:
            states = tuple(h if h.dtype == dtype else h.to(dtype) for h in hidden)
        projection = getattr(model, "text_projection", None)
        output: Any
        if projection is None:
            output = outputs("BaseModelOutputWithPooling")(
                last_hidden_state=last, pooler_output=pooled, hidden_states=states
            )
        else:
            output = sys.modules[_MODULE].CLIPTextModelOutput(
                text_embeds=projection(pooled), last_hidden_state=last, hidden_states=states
            )
        return output.to_tuple() if call.as_tuple else output
