# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""transformers' T5 encoders: T5EncoderModel, MT5EncoderModel (T5 v1.1 itself), UMT5EncoderModel.

Tokens are looked up in `encoder.embed_tokens`, as the model does: `shared` is the same module up to
transformers 4, another one with the same weight from 5 on.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..accelerated import Hidden
from ..encoders import T5Spec
from ..encoders.t5 import TOKENS
from .encoder_call import Call
from .tower import Family, Unsupported, outputs

# Tokens of T5, mT5 and umT5; textual inversion adds rows beyond, which stay in the module.
VOCABULARIES = (32128, 250112, 256384)

_CLASSES = {
    f"transformers.models.{name.lower()}.modeling_{name.lower()}": (f"{name}EncoderModel",)
    for name in ("T5", "MT5", "UMT5")
}
_ACTIVATIONS: dict[str, Literal["gelu_tanh", "relu"]] = {
    "NewGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "ReLU": "relu",
}


class T5(Family):
    """Encoder-only T5 models of every size, gated or not, with one relative bias or many."""

    classes = _CLASSES
    arguments = ("input_ids", "attention_mask")
    unset = frozenset({"head_mask", "inputs_embeds"})
    keeps_hidden = False
    float_masks = True
    parts = frozenset({*_ACTIVATIONS, "Dropout"})
    constants = frozenset(
        {
            "scaling",
            "key_value_proj_dim",
            "n_heads",
            "has_relative_attention_bias",
            "relative_attention_num_buckets",
            "relative_attention_max_distance",
            "is_decoder",
            "variance_epsilon",
            "dropout",
            "p",
            "config",
        }
    )
    wide = ".DenseReluDense.wo"

    def core(self, module: Any) -> Any:
        """With `embed_tokens`, `block` and `final_layer_norm`."""
        return module.encoder

    def spec(self, module: Any) -> T5Spec:
        core = self.core(module)
        blocks = [(block.layer[0], block.layer[-1]) for block in core.block]
        if core.is_decoder or any(len(block.layer) != 2 for block in core.block):
            raise Unsupported("it is a decoder")
        norms = [part.layer_norm for block in blocks for part in block]
        eps = {norm.variance_epsilon for norm in (*norms, core.final_layer_norm)}
        attentions = [part.SelfAttention for part, _ in blocks]
        alike = {
            (
                attention.n_heads,
                attention.key_value_proj_dim,
                attention.relative_attention_num_buckets,
                attention.relative_attention_max_distance,
                getattr(attention, "scaling", 1.0),
                hasattr(dense, "wi_0"),
                (dense.wi_0 if hasattr(dense, "wi_0") else dense.wi).out_features,
                type(dense.act).__name__,
            )
            for attention, dense in zip(
                attentions, (part.DenseReluDense for _, part in blocks), strict=True
            )
        }
        if len(alike) != 1 or len(eps) != 1:
            raise Unsupported("it has no blocks, or they differ from each other")
        heads, head_dim, buckets, distance, scaling, gated, feed_forward, name = alike.pop()
        if name not in _ACTIVATIONS:
            raise Unsupported(f"its activation is {name}, and T5's are gelu_new and relu")
        biased = [bool(attention.has_relative_attention_bias) for attention in attentions]
        every = len(biased) > 1 and all(biased)
        if scaling != 1.0 or not (every or biased == [True] + [False] * (len(biased) - 1)):
            raise Unsupported("its attention is not T5's")
        rows, width = core.embed_tokens.weight.shape
        return T5Spec(
            len(blocks), width, feed_forward, heads, head_dim,
            max((v for v in VOCABULARIES if v <= rows), default=rows),
            gated, _ACTIVATIONS[name], every, buckets, distance, eps.pop(),
        )  # fmt: skip

    def leaf(self, module: Any, name: str) -> nn.Module:
        path = "encoder.embed_tokens" if f"{name}.weight" == TOKENS else name
        found: nn.Module = module.get_submodule(path)
        return found

    def is_plain(self, name: str, leaf: nn.Module) -> bool:
        kind = type(leaf)
        if name.endswith("layer_norm"):  # apex's replaces it where it is installed
            return kind.__module__ in _CLASSES and kind.__name__.endswith("LayerNorm")
        table = f"{name}.weight" == TOKENS or name.endswith("relative_attention_bias")
        return kind is (nn.Embedding if table else nn.Linear)

    def table(self, module: Any) -> Any:
        return module.encoder.embed_tokens

    def live(self, module: Any) -> list[nn.Module]:
        return [*super().live(module), module.shared]

    def parkable(self, module: Any) -> list[nn.Module]:
        return [*module.encoder.block, module.encoder.final_layer_norm]

    def configs(self, module: Any) -> tuple[Any, ...]:
        return (module.config, module.encoder.config)

    def output(
        self, model: Any, call: Call, hidden: Hidden, last: Tensor, dtype: torch.dtype
    ) -> Any:
        kind = outputs("BaseModelOutputWithPastAndCrossAttentions")
        output = kind(last_hidden_state=last.to(dtype))
        return output.to_tuple() if call.as_tuple else output
