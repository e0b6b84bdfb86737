# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""What a config.json (transformers) or open_clip_config.json says that tensors cannot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..encoders import T5Spec
from ..encoders.ops import Activation
from ..errors import FileError, UnsupportedEncoder
from .files import Config, shown
from .t5 import is_sound

# Defaults of transformers' CLIPTextConfig and OpenCLIP's CLIPTextCfg: a saved config may omit them.
_HF_DEFAULTS = {
    "hidden_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
_OPEN_CLIP_DEFAULTS = {"width": 512, "layers": 12, "heads": 8}
_PLAIN_POOLING = ("argmax", "eos")


@dataclass(frozen=True)
class TextConfig:
    """The facts of the text encoder that a config describes."""

    width: int
    layers: int
    heads: int
    activation: str
    layer_norm_eps: float
    unsupported: str | None = None  # why it is no CLIP text encoder, "has ..." or "names ..."


def text_config(config: Config) -> TextConfig | None:
    """Read a config; None where it describes no text encoder. Raises FileError on nonsense."""
    try:
        return _text_config(config.values)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        remedy = "repair it or download it again"
        fault = f"does not describe a text encoder ({shown(str(error))})"
        raise FileError(config.path, fault, remedy) from error


def _text_config(values: Mapping[str, Any]) -> TextConfig | None:
    if "model_cfg" in values:
        model = values["model_cfg"]
        text = {**_OPEN_CLIP_DEFAULTS, **model["text_cfg"]}
        unsupported = None
        if text.get("no_causal_mask"):
            unsupported = "has attention that is not causal"
        elif text.get("pool_type", "argmax") not in _PLAIN_POOLING:
            unsupported = f"pools by {shown(str(text['pool_type']))}"
        activation = "quick_gelu" if model.get("quick_gelu") else "gelu"
        if text.get("act_kwargs"):
            activation += f" with {text['act_kwargs']}"
        width, layers, heads = text["width"], text["layers"], text["heads"]
        eps = (text.get("norm_kwargs") or {}).get("eps", 1e-5)
    else:
        kind = values.get("model_type")
        unsupported = None
        if kind not in (None, "clip", "clip_text_model"):
            unsupported = f"is a {shown(str(kind))}"
        if "text_config" in values or "text_config_dict" in values or kind == "clip":
            nested = (values.get("text_config") or {}, values.get("text_config_dict") or {})
            text = {**_HF_DEFAULTS, **nested[0], **nested[1]}
        elif "hidden_size" in values or kind == "clip_text_model":
            text = {**_HF_DEFAULTS, **values}
        else:
            return None
        width, layers = text["hidden_size"], text["num_hidden_layers"]
        heads, activation = text["num_attention_heads"], text["hidden_act"]
        eps = text["layer_norm_eps"]
    if not all(type(n) is int and n > 0 for n in (width, layers, heads)) or not 0 < eps < 1:
        raise ValueError("a size is not positive")
    return TextConfig(width, layers, heads, str(activation), float(eps), unsupported)


def matching(config: Config | None, width: int, layers: int) -> TextConfig | None:
    """The config's facts if it is this encoder's: of these sizes.

    Raises FileError where the user gave the folder and the sizes differ, UnsupportedEncoder where
    it is this encoder's and says that its mathematics is not CLIP's.
    """
    found = text_config(config) if config else None
    if config is None or found is None:
        return None
    if (found.width, found.layers) != (width, layers):
        if not config.binding:
            return None
        fault = f"says {found.layers} layers of width {found.width}, the weights have {layers}"
        remedy = "use this encoder's own config.json or give the weights file itself"
        raise FileError(config.path, f"{fault} of width {width}", remedy)
    if found.unsupported:
        remedy = "give a CLIP-L, CLIP-H, CLIP-G or LongCLIP"
        raise UnsupportedEncoder(config.path, f"its encoder {found.unsupported}", remedy)
    return found


def activation_of(config: Config, found: TextConfig) -> Activation:
    """Raises UnsupportedEncoder where it is neither quick_gelu nor gelu."""
    if found.activation == "quick_gelu":
        return "quick_gelu"
    if found.activation == "gelu":
        return "gelu"
    fault = f"names the activation {shown(found.activation)}"
    remedy = "only quick_gelu and gelu are served; override it if the config is wrong"
    raise UnsupportedEncoder(config.path, fault, remedy)


# T5

# Defaults of transformers' T5Config; UMT5Config and MT5Config have a gated feed-forward.
_T5_DEFAULTS = {
    "d_model": 512,
    "num_layers": 6,
    "num_heads": 8,
    "layer_norm_epsilon": 1e-6,
    "relative_attention_max_distance": 128,
    "feed_forward_proj": "relu",
}
_T5_TYPES = (None, "t5", "umt5", "mt5")
_T5_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def with_t5_config(config: Config | None, spec: T5Spec) -> T5Spec:
    """The spec with what a config of these sizes says that tensors cannot.

    Raises FileError on nonsense and where the user gave the folder and the sizes differ,
    UnsupportedEncoder where it is this encoder's and names mathematics that is not served.
    """
    if config is None or "d_model" not in config.values:
        return spec
    kind = config.values.get("model_type")
    said = {**_T5_DEFAULTS, **config.values}
    if kind in ("umt5", "mt5") and "feed_forward_proj" not in config.values:
        said["feed_forward_proj"] = "gated-gelu"
    sizes = (said["num_layers"], said["d_model"], said["num_heads"])
    gating, _, activation = str(said["feed_forward_proj"]).rpartition("-")
    if (*sizes, gating == "gated") != (spec.layers, spec.width, spec.heads, spec.gated):
        if not config.binding:
            return spec
        fault = (
            f"says {sizes[0]} layers of width {sizes[1]} with {sizes[2]} heads"
            f"{', gated' if gating == 'gated' else ''}; the weights have {spec.layers} of width "
            f"{spec.width} with {spec.heads}{', gated' if spec.gated else ''}"
        )
        remedy = "use this encoder's own config.json or give the weights file itself"
        raise FileError(config.path, fault, remedy)
    if kind not in _T5_TYPES:
        remedy = "give a T5, mT5 or umT5"
        raise UnsupportedEncoder(config.path, f"its encoder is a {shown(str(kind))}", remedy)
    if gating and activation == "gelu":
        activation = "gelu_new"  # transformers reads "gated-gelu" so
    if gating not in ("", "gated") or activation not in _T5_ACTIVATIONS:
        fault = f"names the feed-forward {shown(str(said['feed_forward_proj']))}"
        raise UnsupportedEncoder(config.path, fault, "only relu, gated-gelu and alike are served")
    eps, distance = said["layer_norm_epsilon"], said["relative_attention_max_distance"]
    told = replace(
        spec, activation=_T5_ACTIVATIONS[activation], norm_eps=eps, max_distance=distance
    )
    if not is_sound(told):
        fault = "has no sound layer_norm_epsilon or relative_attention_max_distance"
        raise FileError(config.path, fault, "repair it or download it again")
    return told
