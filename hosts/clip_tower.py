# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""A live CLIP text model of transformers: what it consists of, and what its weights are now.

`tower_of` goes by structure, so it knows both layouts: up to transformers 5.5 the tower is
`model.text_model`, from 5.6 on a CLIPTextModel is the tower itself. transformers, PEFT, accelerate
and diffusers are never imported: their classes are told by module and name. The model is not
changed, except that `park` moves weights to host memory, where a hook waits to bring them back.
"""

from __future__ import annotations

import hashlib
import operator
import types
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..encoders import ClipSpec
from ..encoders.clip import END_TOKEN, PROJECTION, TOKENS

CLIP_MODULE = "transformers.models.clip.modeling_clip"
CLASSES = ("CLIPTextModel", "CLIPTextModelWithProjection")
VOCABULARY = END_TOKEN + 1  # textual inversion adds rows beyond; they stay in the module
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PROBES = 16  # values looked at in each weight at every call

_ACTIVATIONS: dict[str, Literal["quick_gelu", "gelu"]] = {
    "QuickGELUActivation": "quick_gelu",
    "GELUActivation": "gelu",
    "GELU": "gelu",
}
# Hooks that move weights and change nothing else.
_ACCELERATE_HOOKS = {"AlignDevicesHook", "CpuOffload", "SequentialHook"}
_DIFFUSERS_HOOKS = {"group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading"}
_PROJECTION = PROJECTION.removesuffix(".weight")


class Unsupported(Exception):  # noqa: N818 - never leaves this module
    """Why a model is left to PyTorch, as half a sentence."""


@dataclass(eq=False)
class Tower:
    """One CLIP text model as found, without a reference to the model; good while `is_current`.

    `leaves`: canonical name of whatever holds parameters -> that module, under any LoRA.
    `adapters`: canonical name of a linear -> the PEFT layer around it.
    """

    spec: ClipSpec
    projection_shape: tuple[int, int] | None
    dtype: torch.dtype
    eos_token: int
    leaves: dict[str, nn.Module]
    adapters: dict[str, Any]
    # What was found, as columns: is_current is asked at every call and loops in C.
    _holders: list[dict[str, Any]]
    _keys: list[str]
    _found: list[Any]
    _parts: list[dict[str, Any]]  # the __dict__ of each module that an engine leaves out
    _factors: tuple[list[Tensor], list[Watch]] = field(init=False, default=([], []))

    def __post_init__(self) -> None:
        names = [name.rpartition(".") for name in self.spec.tensors() if name != TOKENS]
        self._watch = Watch([_kept(self.leaves[path], kind) for path, _, kind in names])
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_modules")
        self._counted = [part[kind] for part in self._parts for kind in kinds]
        self._counts = self._count()

    def _count(self) -> tuple[int, int]:
        """Hooks on the parts and children of them, and parts whose `forward` is replaced."""
        return (
            sum(map(len, self._counted)),
            sum(map(operator.contains, self._parts, repeat("forward"))),
        )

    def is_current(self) -> bool:
        """Whether the model still has the very parts and hooks that were found."""
        return (
            all(map(operator.is_, map(dict.get, self._holders, self._keys), self._found))
            and self._count() == self._counts
            and self._watch.look()
        )

    def is_trained(self) -> bool:
        """Whether some weight wants gradients, as freshly loaded ones do."""
        holders = (*self.leaves.values(), *self.adapters.values())
        return any(p.requires_grad for holder in holders for p in holder.parameters())

    def read(self, name: str) -> Tensor:
        """The weight `name` without LoRA, wherever an offload hook keeps it."""
        path, _, kind = name.rpartition(".")
        weight = _kept(self.leaves[path], kind).detach()
        return weight[:VOCABULARY] if name == TOKENS else weight

    @torch.no_grad()
    def effective(self, name: str) -> Tensor:
        """As `read`, with the active LoRA adapters added in FP32 as PEFT's `merge` adds them."""
        weight = self.read(name)
        layer: Any = self.adapters.get(name.removesuffix(".weight"))
        for adapter in [] if layer is None else _active(layer):
            down, up = (_kept(m[adapter], "weight").float() for m in (layer.lora_A, layer.lora_B))
            delta = (up @ down) * layer.scaling[adapter]  # [out, in]
            weight = weight.to(delta) + (delta.T if layer.fan_in_fan_out else delta)
        return weight

    def adapter_refusal(self) -> str | None:
        """Why the adapters cannot be merged into an engine's weights, or None."""
        return next(filter(None, map(_adapter_refusal, self.adapters.values())), None)

    def content(self) -> str:
        """Digest of the weights without LoRA."""
        return self._watch.digest()

    def identity(self) -> tuple[Hashable, ...]:
        """What `effective` gives now, `content()` first: equal for equal values, wherever they lie.

        Changes in place show, so do a scale and a set of active adapters.
        """
        factors: list[Tensor] = []
        scales: list[tuple[str, float]] = []
        for name, layer in self.adapters.items():
            for adapter in _active(layer):
                factors += [_kept(m[adapter], "weight") for m in (layer.lora_A, layer.lora_B)]
                scales.append((name, float(layer.scaling[adapter])))
        if not factors:
            return (self.content(),)
        if list(map(id, self._factors[0])) != list(map(id, factors)):
            dtypes = sorted({f.dtype for f in factors}, key=str)
            watches = [Watch([f for f in factors if f.dtype == dtype]) for dtype in dtypes]
            self._factors = factors, watches
        watches = self._factors[1]
        return self.content(), tuple(scales), tuple(w.look() and w.digest() for w in watches)

    def lies_apart(self) -> bool:
        """Whether some of its weights are not in host memory."""
        return self._watch.lies_apart


# Recognition


def tower_of(module: nn.Module) -> Tower | str:
    """The CLIP text model that `module` is, or why it is left to PyTorch, as half a sentence."""
    try:
        return _tower_of(module)
    except Unsupported as reason:
        return str(reason)
    except AttributeError as error:
        return f"its structure is not that of transformers' CLIP ({error})"


def core_of(module: nn.Module) -> Any:
    """The tower itself, with `embeddings`, `encoder` and `final_layer_norm`."""
    return getattr(module, "text_model", module)


def _tower_of(module: nn.Module) -> Tower:
    kind: Any = type(module)
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        raise Unsupported("it is compiled (torch.compile)")
    known = [c for c in kind.__mro__ if c.__module__ == CLIP_MODULE and c.__name__ in CLASSES]
    if not known:
        raise Unsupported(f"{kind.__name__} is no text encoder that Octavo has engines for")
    if kind.forward is not known[0].forward:
        raise Unsupported(f"{kind.__name__} computes something of its own in forward")
    core = core_of(module)
    found = {n: core.get_submodule(n.removeprefix("text_model.")) for n in _names(core)}
    if hasattr(module, "text_projection"):
        found[_PROJECTION] = module.text_projection
    adapters = {n: m for n, m in found.items() if _is_adapter(m)}
    leaves = {n: m.get_base_layer() if n in adapters else m for n, m in found.items()}
    spec = _spec_of(core)
    dtypes = {w.dtype for name, leaf in leaves.items() for w in _plain(name, leaf, spec)}
    if len(dtypes) != 1:
        raise Unsupported(f"its weights are of several dtypes ({', '.join(map(str, dtypes))})")
    # These two are called as before, so whatever hangs on them keeps working.
    live = {id(core.embeddings.token_embedding), id(getattr(module, "text_projection", None))}
    live.add(id(module))
    parts = [(name, part) for name, part in module.named_modules() if id(part) not in live]
    _check_parts(parts, {id(leaf) for leaf in leaves.values()})
    holders = [m._modules for m in module.modules()]
    holders += [leaf._parameters for leaf in leaves.values() if id(leaf) not in live]
    places = [(holder, key, found) for holder in holders for key, found in holder.items()]
    projection: Any = getattr(leaves.get(_PROJECTION), "weight", None)
    return Tower(
        spec,
        None if projection is None else (projection.shape[0], projection.shape[1]),
        dtypes.pop(),
        int(core.eos_token_id),
        leaves,
        {name: layer for name, layer in adapters.items() if name != _PROJECTION},
        [holder for holder, _, _ in places],
        [key for _, key, _ in places],
        [found for _, _, found in places],
        [part.__dict__ for _, part in parts],
    )


def _names(core: Any) -> list[str]:
    """Canonical names of every module with parameters, but for the projection."""
    spec = ClipSpec(len(core.encoder.layers), 1, 1, 1, 1, 1, "gelu")
    return list(dict.fromkeys(name.rpartition(".")[0] for name in spec.tensors()))


def _spec_of(core: Any) -> ClipSpec:
    layers = list(core.encoder.layers)
    tokens, positions = core.embeddings.token_embedding, core.embeddings.position_embedding
    norms = [n for layer in layers for n in (layer.layer_norm1, layer.layer_norm2)]
    eps = {norm.eps for norm in (*norms, core.final_layer_norm)}
    alike = {
        (
            type(layer.mlp.activation_fn).__name__,
            getattr(layer.mlp.activation_fn, "approximate", "none"),
            layer.self_attn.num_heads,
            layer.mlp.fc1.out_features,
        )
        for layer in layers
    }
    if len(alike) != 1 or len(eps) != 1:
        raise Unsupported("it has no layers, or they differ from each other")
    activation, approximate, heads, feed_forward = alike.pop()
    if activation not in _ACTIVATIONS or approximate != "none":
        raise Unsupported(f"its activation is {activation}, and CLIP's are quick_gelu and gelu")
    rows, width = tokens.weight.shape
    if rows < VOCABULARY:
        raise Unsupported(f"its vocabulary has {rows} tokens, and CLIP's has {VOCABULARY}")
    return ClipSpec(
        len(layers), width, feed_forward, heads, positions.weight.shape[0], VOCABULARY,
        _ACTIVATIONS[activation], eps.pop(),
    )  # fmt: skip


def _plain(name: str, leaf: nn.Module, spec: ClipSpec) -> Iterator[Tensor]:
    """The weights of a leaf, all of them plain: one test for every way of quantizing."""
    wanted = nn.Embedding if "embedding" in name else nn.LayerNorm if "norm" in name else nn.Linear
    if type(leaf) is not wanted:
        raise Unsupported(f"{name} is a {type(leaf).__module__}.{type(leaf).__name__}")
    shapes = {**spec.tensors(), PROJECTION: None, TOKENS: None}
    for full in (f"{name}.{kind}" for kind in ("weight", "bias") if f"{name}.{kind}" in shapes):
        kind = full.rpartition(".")[2]
        if type(getattr(leaf, kind).data) is not Tensor:
            raise Unsupported(f"{full} is quantized ({type(getattr(leaf, kind).data).__name__})")
        weight = _kept(leaf, kind)
        if weight.is_meta:
            raise Unsupported(f"{full} is on the meta device and holds no values")
        if weight.dtype not in DTYPES:
            raise Unsupported(f"{full} is {str(weight.dtype).removeprefix('torch.')}")
        if weight.is_inference() or not weight.is_contiguous():
            raise Unsupported(f"{full} is an inference tensor or not contiguous")
        if shapes[full] not in (None, tuple(weight.shape)):
            raise Unsupported(f"{full} has shape {tuple(weight.shape)}, not {shapes[full]}")
        yield weight


def _check_parts(parts: Sequence[tuple[str, nn.Module]], leaves: set[int]) -> None:
    """Raise where another library replaced a part, or hooks into one that an engine leaves out."""
    in_adapters = {id(m) for _, part in parts if _is_adapter(part) for m in part.modules()}
    for name, part in parts:
        kind = type(part)
        if not (
            kind.__module__ == CLIP_MODULE
            or kind is nn.ModuleList
            or kind.__name__ in _ACTIVATIONS
            or id(part) in leaves | in_adapters
        ):
            raise Unsupported(f"{name} is a {kind.__module__}.{kind.__name__}")
        for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values()):
            origin = str(getattr(hook, "__module__", None) or type(hook).__module__)
            # transformers' own hooks record hidden states where they are asked for
            if hook is not _bring_home and not origin.startswith("transformers."):
                raise Unsupported(f"a hook of {origin} is on {name}")
        if not has_own_forward(part):
            raise Unsupported(f"the forward of {name} is replaced by another library")
        accelerate = part.__dict__.get("_hf_hook")
        kinds = {type(h).__name__ for h in (accelerate, *getattr(accelerate, "hooks", ())) if h}
        others = kinds - _ACCELERATE_HOOKS
        others |= set(getattr(part.__dict__.get("_diffusers_hook"), "hooks", ())) - _DIFFUSERS_HOOKS
        if others:
            raise Unsupported(f"a hook is on {name} ({', '.join(sorted(others))})")


# Other libraries' hooks


def is_managed(module: nn.Module) -> bool:
    """Whether a hook of accelerate or diffusers decides where some of its weights are."""
    return any(
        "_hf_hook" in m.__dict__ or getattr(m.__dict__.get("_diffusers_hook"), "hooks", None)
        for m in module.modules()
    )


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


# LoRA


def _is_adapter(module: nn.Module) -> bool:
    bases = type(module).__mro__
    return any(c.__name__ == "BaseTunerLayer" and c.__module__.startswith("peft.") for c in bases)


def _active(layer: Any) -> list[str]:
    """The adapters that change the result of a PEFT LoRA layer beyond its base weight."""
    if layer.disable_adapters or layer.merged:
        return []
    return [a for a in layer.active_adapters if a in layer.lora_A and layer.scaling[a] != 0]


def _adapter_refusal(layer: Any) -> str | None:
    kind = type(layer)
    if (kind.__module__, kind.__name__) != ("peft.tuners.lora.layer", "Linear"):
        return f"an adapter is a {kind.__module__}.{kind.__name__}, which Octavo cannot merge"
    if layer.disable_adapters and layer.merged:
        return "adapters are fused and disabled, which PEFT resolves in its own forward"
    for adapter in _active(layer):
        variant = getattr(layer, "lora_variant", {}).get(adapter)
        if variant is not None or getattr(layer, "use_dora", {}).get(adapter, False):
            return f"adapter '{adapter}' is a variant of LoRA, which Octavo cannot merge"
        if getattr(layer, "lora_bias", {}).get(adapter, False):
            return f"adapter '{adapter}' has a bias of its own"
        dropout = layer.lora_dropout[adapter]
        if dropout.training and getattr(dropout, "p", 0.0) > 0:
            return f"adapter '{adapter}' is in training mode with dropout"
        for factor in (layer.lora_A[adapter], layer.lora_B[adapter]):
            if type(factor) is not nn.Linear or _kept(factor, "weight").dtype not in DTYPES:
                return f"the factors of adapter '{adapter}' are not plain weights"
    return None


# Weights: what they are


def _kept(leaf: nn.Module, name: str) -> Tensor:
    """The parameter, or what accelerate keeps in its hook's map while the parameter is `meta`."""
    tensor: Tensor = getattr(leaf, name)
    if tensor.is_meta:
        kept = getattr(leaf.__dict__.get("_hf_hook"), "weights_map", None)
        if kept is not None:
            tensor = kept[name]
    return tensor


_VERSION = operator.attrgetter("_version")


class Watch:
    """Tells whether tensors of one dtype still hold what they held, without reading them whole.

    Three signs: the version counter, which every in-place operation on a parameter raises; 16
    values spread over each tensor, since a write through `.data` (as PEFT fuses) leaves no other
    trace; and, where one of these has changed, an exact sum of all bits. Moving a tensor changes
    none of them. A write through `.data` to a small part of a tensor can go unseen.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors, self._dtype = tensors, tensors[0].dtype
        wide = self._dtype.itemsize == 4
        self._bits = torch.int32 if wide else torch.int16
        self._row = np.dtype(np.int32 if wide else np.int16)
        self._pointers: list[int] = []
        self._seen: tuple[list[int], bytes] | None = None
        self._digest = ""
        self.look()

    def look(self) -> bool:
        """See where the tensors lie now; False if they are not of their dtype any more."""
        pointers = list(map(Tensor.data_ptr, self._tensors))
        if pointers != self._pointers:
            if any(t.dtype != self._dtype for t in self._tensors):
                return False
            on_host = [t.device.type == "cpu" for t in self._tensors]
            self._here = [i for i, here in enumerate(on_host) if here]
            self._there = [i for i, here in enumerate(on_host) if not here]
            # Views are kept of host memory only: they would hold the GPU memory of moved weights.
            self._views = [self._few(self._tensors[i]).numpy() for i in self._here]
            self._pointers = pointers
        return True

    @property
    def lies_apart(self) -> bool:
        """Whether some tensor is not in host memory, as of the last `look`."""
        return bool(self._there)

    @torch.no_grad()
    def digest(self) -> str:
        """Equal for equal values, on any device. Call `look` before."""
        seen = list(map(_VERSION, self._tensors)), self._probe()
        if seen != self._seen:
            sums = [t.view(self._bits).sum() for t in self._tensors]  # enqueued before any wait
            exact = ",".join(str(int(s)) for s in sums)
            self._digest = hashlib.sha256(exact.encode() + seen[1]).hexdigest()
            self._seen = seen
        return self._digest

    def _probe(self) -> bytes:
        if not self._there:
            return np.concatenate(self._views).tobytes()
        rows = np.empty((len(self._tensors), PROBES), self._row)
        if self._here:
            rows[self._here] = np.concatenate(self._views).reshape(-1, PROBES)
        few = torch.cat([self._few(self._tensors[i]) for i in self._there]).cpu()
        rows[self._there] = few.numpy().reshape(-1, PROBES)
        return rows.tobytes()

    def _few(self, tensor: Tensor) -> Tensor:
        step = (tensor.numel() - 1) // (PROBES - 1)
        step -= step > 1 and step % 2 == 0  # an odd step does not stay in one column
        return tensor.detach().as_strided((PROBES,), (step,)).view(self._bits)


# Weights: where they are


def park(module: nn.Module, device: torch.device) -> None:
    """Move what an engine has in its own form from `device` to host memory.

    The token table and the projection stay. PyTorch's next use of a part fetches it.
    """
    for part in _parkable(module):
        if any(p.device == device for p in part.parameters()):
            _place(part, torch.device("cpu"))
            if not _is_parked(part):
                part.register_forward_pre_hook(_bring_home, with_kwargs=True)


def unpark(module: nn.Module) -> None:
    """Undo `park`: back beside the token table; what an offload hook manages is left to it."""
    parked = list(filter(_is_parked, _parkable(module)))
    managed = bool(parked) and is_managed(module)
    for part in parked:
        if not managed:
            _place(part, core_of(module).embeddings.token_embedding.weight.device)
        _forget(part)


def _parkable(module: nn.Module) -> list[nn.Module]:
    core = core_of(module)
    return [*core.encoder.layers, core.embeddings.position_embedding, core.final_layer_norm]


@torch.no_grad()
def _place(part: nn.Module, device: torch.device) -> None:
    with torch.inference_mode(False):  # or the weights would be inference tensors for ever
        for parameter in part.parameters():
            if parameter.device != device:
                parameter.data = parameter.data.to(device)


def _bring_home(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Pre-hook of a parked part: its weights follow its input, whoever calls it.

    It refers to nothing, so that the copy of a parked model brings its own weights home.
    """
    given = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
    if given is not None:
        if not is_managed(part):  # an offload hook came since: it has the weights, or their place
            _place(part, given.device)
        _forget(part)


def _is_parked(part: nn.Module) -> bool:
    return _bring_home in part._forward_pre_hooks.values()


def _forget(part: nn.Module) -> None:
    for key in [k for k, hook in part._forward_pre_hooks.items() if hook is _bring_home]:
        del part._forward_pre_hooks[key]
        part._forward_pre_hooks_with_kwargs.pop(key, None)
