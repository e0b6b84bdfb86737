# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""What accelerate, diffusers, PEFT and transformers have hung into a model, told by names."""

from __future__ import annotations

import types
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Hooks that move weights and change nothing else.
_ACCELERATE_HOOKS = {"AlignDevicesHook", "CpuOffload", "SequentialHook"}
_DIFFUSERS_HOOKS = {"group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading"}


def is_managed(module: nn.Module) -> bool:
    """Whether a hook of accelerate or diffusers decides where some of its weights are."""
    return any(
        "_hf_hook" in m.__dict__ or getattr(m.__dict__.get("_diffusers_hook"), "hooks", None)
        for m in module.modules()
    )


def comes_and_goes(module: nn.Module) -> bool:
    """Whether accelerate brings the whole of it to the GPU for a call and takes it away after."""
    hook = module.__dict__.get("_hf_hook")
    return any(type(h).__name__ == "CpuOffload" for h in (hook, *getattr(hook, "hooks", ())))


def foreign_hooks(module: nn.Module) -> set[str]:
    """Names of those hooks of accelerate and diffusers that do more than moving weights."""
    accelerate = module.__dict__.get("_hf_hook")
    kinds = {type(h).__name__ for h in (accelerate, *getattr(accelerate, "hooks", ())) if h}
    diffusers = set(getattr(module.__dict__.get("_diffusers_hook"), "hooks", ()))
    return kinds - _ACCELERATE_HOOKS | diffusers - _DIFFUSERS_HOOKS


def forward_slot(module: nn.Module) -> tuple[dict[str, Any], str]:
    """(dict, key) where the innermost `forward` of `module` is kept, under any offload hook.

    accelerate keeps it in `_old_forward`, diffusers' hooks in their first function reference; what
    is written there survives that these hooks are taken off and put on again after every image.
    """
    own = module.__dict__
    if "_hf_hook" in own and "_old_forward" in own:
        return own, "_old_forward"
    references = getattr(own.get("_diffusers_hook"), "_fn_refs", None)
    if references:
        first = references[0].__dict__
        return first, "forward" if first["original_forward"] is None else "original_forward"
    return own, "forward"


def has_own_forward(module: nn.Module) -> bool:
    """Whether the innermost `forward` of `module` is that of its class."""
    slots, key = forward_slot(module)
    found, own = slots.get(key), type(module).forward
    if isinstance(found, types.MethodType):
        return found.__func__ is own and found.__self__ is module
    if isinstance(found, partial):  # a copied module's
        return found.func is own and found.args == (module,)
    return found is None


def class_has_own_forward(kind: type) -> bool:
    """Whether `kind.forward` is what was defined with the class, and nobody's replacement.

    transformers and torch wrap some themselves; a wrapper may bear the name of what it wraps.
    """
    origin = next(c for c in kind.__mro__ if "forward" in vars(c))
    found = vars(origin)["forward"]
    home = getattr(found, "__globals__", vars(origin)).get("__name__", origin.__module__)
    return getattr(found, "__module__", None) == origin.__module__ and home.partition(".")[0] in (
        origin.__module__.partition(".")[0],
        "torch",
    )


def kept(leaf: nn.Module, name: str) -> Tensor:
    """The parameter, or what accelerate keeps in its hook's map while the parameter is `meta`.

    A part that lies in a model twice, as T5's token table up to transformers 4, has two hooks.
    """
    tensor: Tensor = getattr(leaf, name)
    if tensor.is_meta:
        hook = leaf.__dict__.get("_hf_hook")
        for one in (hook, *getattr(hook, "hooks", ())):
            weights = getattr(one, "weights_map", None)
            if weights is not None and not weights[name].is_meta:
                return cast(Tensor, weights[name])
    return tensor


# LoRA


def is_adapter(module: nn.Module) -> bool:
    """Whether it is a layer of PEFT around one of the model's own."""
    bases = type(module).__mro__
    return any(c.__name__ == "BaseTunerLayer" and c.__module__.startswith("peft.") for c in bases)


def active_adapters(layer: Any) -> list[str]:
    """The adapters that change the result of a PEFT LoRA layer beyond its base weight."""
    if layer.disable_adapters or layer.merged:
        return []
    return [a for a in layer.active_adapters if a in layer.lora_A and layer.scaling[a] != 0]


def adapter_refusal(layer: Any) -> str | None:
    """Why the adapters of a PEFT layer cannot be merged into an engine's weights, or None."""
    kind = type(layer)
    if (kind.__module__, kind.__name__) != ("peft.tuners.lora.layer", "Linear"):
        return f"an adapter is a {kind.__module__}.{kind.__name__}, which Octavo cannot merge"
    if layer.disable_adapters and layer.merged:
        return "adapters are fused and disabled, which PEFT resolves in its own forward"
    for adapter in active_adapters(layer):
        variant = getattr(layer, "lora_variant", {}).get(adapter)
        if variant is not None or getattr(layer, "use_dora", {}).get(adapter, False):
            return f"adapter '{adapter}' is a variant of LoRA, which Octavo cannot merge"
        if getattr(layer, "lora_bias", {}).get(adapter, False):
            return f"adapter '{adapter}' has a bias of its own"
        dropout = layer.lora_dropout[adapter]
        if dropout.training and getattr(dropout, "p", 0.0) > 0:
            return f"adapter '{adapter}' is in training mode with dropout"
        for factor in (layer.lora_A[adapter], layer.lora_B[adapter]):
            if type(factor) is not nn.Linear or kept(factor, "weight").dtype not in DTYPES:
                return f"the factors of adapter '{adapter}' are not plain weights"
    return None
