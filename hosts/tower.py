# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""A live text encoder of transformers: what it consists of, and what its weights are now.

`recognise` goes by structure, so it knows the layouts of all versions. transformers, PEFT,
accelerate and diffusers are never imported: their classes are told by module and name. What differs
between CLIP and T5 is in their `Family`.
"""

from __future__ import annotations

import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..accelerated import Hidden
from ..encoders import EncoderSpec
from ..encoders.clip import PROJECTION
from .encoder_call import Call
from .hooks import (
    DTYPES,
    active_adapters,
    adapter_refusal,
    class_has_own_forward,
    foreign_hooks,
    forward_slot,
    has_own_forward,
    is_adapter,
    kept,
)
from .parking import bring_home
from .watch import Counting, Watches

_PROJECTION = PROJECTION.removesuffix(".weight")
_TRAINING = operator.itemgetter("training")
_FORWARD = repeat("forward")
# transformers' own ways to compute attention; None where a version does not choose.
_ATTENTION = "_attn_implementation_internal"
_ATTENTIONS = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


class Unsupported(Exception):  # noqa: N818 - never leaves this package
    """Why a model is left to PyTorch, as half a sentence."""


class Family(ABC):
    """What is particular about the models of one encoder family in transformers.

    `classes`: module -> classes that are served. `arguments`: the positional ones of every version.
    `unset`: others that mean nothing while they are None. `keeps_hidden`: whether engines give the
    hidden states. `float_masks`: whether a mask may be of floats. `parts`: classes beyond the
    family's own modules that may lie inside. `constants`: attributes of parts, beside weights, that
    the result depends on. `wide`: how the names of those linears end that transformers leaves in
    FP32 when it loads a model in 16 bits.
    """

    classes: ClassVar[Mapping[str, tuple[str, ...]]]
    arguments: ClassVar[tuple[str, ...]]
    unset: ClassVar[frozenset[str]] = frozenset()
    keeps_hidden: ClassVar[bool]
    float_masks: ClassVar[bool] = False
    parts: ClassVar[frozenset[str]]
    constants: ClassVar[frozenset[str]]
    wide: ClassVar[str | None] = None

    @abstractmethod
    def core(self, module: Any) -> Any:
        """The stack of layers inside the model."""

    @abstractmethod
    def spec(self, module: Any) -> EncoderSpec:
        """Raises Unsupported or AttributeError where no engine computes the same."""

    @abstractmethod
    def leaf(self, module: Any, name: str) -> nn.Module:
        """The part that holds the parameters of the canonical `name` (without `.weight`)."""

    @abstractmethod
    def is_plain(self, name: str, leaf: nn.Module) -> bool:
        """Whether the part under `name` is of the class that transformers puts there."""

    @abstractmethod
    def table(self, module: Any) -> Any:
        """The token embeddings, which are called as before."""

    def positions(self, module: Any) -> Counting | None:
        """What tells whether the model's own positions are 0, 1, 2, ..., where it has any."""
        return None

    def live(self, module: Any) -> list[nn.Module]:
        """The parts that are called as before or never, so that anything may hang on them."""
        return [module, self.table(module)]

    @abstractmethod
    def parkable(self, module: Any) -> list[nn.Module]:
        """The parts that an engine has in its own form."""

    def configs(self, module: Any) -> tuple[Any, ...]:
        """The configs that say what `forward` returns."""
        return (module.config,)

    @abstractmethod
    def output(
        self, model: Any, call: Call, hidden: Hidden, last: Tensor, dtype: torch.dtype
    ) -> Any:
        """What the model's class returns for `call`, in `dtype`."""

    def known(self, module: nn.Module) -> type | None:
        """The class of this family that `module` is or descends from, or None."""
        found = (
            c for c in type(module).__mro__ if c.__name__ in self.classes.get(c.__module__, ())
        )
        return next(found, None)


@dataclass(eq=False)
class Tower:
    """One text encoder as found, without a reference to the model; good while `is_current`.

    `dtype`: of the token embeddings, and so of what the model returns. `leaves`: canonical name of
    whatever holds parameters -> that module, under any LoRA. `adapters`: canonical name of a linear
    -> the PEFT layer around it.
    """

    family: Family
    spec: EncoderSpec
    projection_shape: tuple[int, int] | None
    dtype: torch.dtype
    leaves: dict[str, nn.Module]
    adapters: dict[str, Any]
    # What was found, as columns: is_current is asked at every call and loops in C.
    _holders: list[dict[str, Any]]
    _keys: list[str]
    _found: list[Any]
    _parts: list[dict[str, Any]]  # the __dict__ of each module that an engine leaves out ...
    _droppers: list[dict[str, Any]]  # ... and of those among them that know dropout
    _classes: list[Any]  # of the model and those parts
    _positions: Counting | None
    _factors: tuple[list[Tensor], Watches | None] = field(init=False, default=([], None))

    def __post_init__(self) -> None:
        table = self.spec.token_table
        names = [name.rpartition(".") for name in self.spec.tensors() if name != table]
        self._watch = Watches([kept(self.leaves[path], kind) for path, _, kind in names])
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_modules")
        counted = [part[kind] for part in self._parts for kind in kinds]
        # Most have no hooks and no children, and whether all are empty is asked faster.
        self._empty = [one for one in counted if not one]
        self._counted = [one for one in counted if one]
        self._count = sum(map(len, self._counted))
        self._plain = [part for part in self._parts if "forward" not in part]
        self._methods = [kind.forward for kind in self._classes]

    def is_current(self) -> bool:
        """Whether the model still has the very parts, hooks and constants that were found."""
        return (
            all(map(operator.is_, map(dict.get, self._holders, self._keys), self._found))
            and not any(self._empty)
            and sum(map(len, self._counted)) == self._count
            and not any(map(operator.contains, self._plain, _FORWARD))
            and all(map(operator.is_, map(getattr, self._classes, _FORWARD), self._methods))
            and self._watch.look()
            and (self._positions is None or self._positions.holds())
        )

    def is_trained(self) -> bool:
        """Whether some weight wants gradients, as freshly loaded ones do."""
        holders = (*self.leaves.values(), *self.adapters.values())
        return any(p.requires_grad for holder in holders for p in holder.parameters())

    def is_training(self) -> bool:
        """Whether some part is in training mode and drops values out."""
        return any(map(_TRAINING, self._droppers))

    def read(self, name: str) -> Tensor:
        """The weight `name` without LoRA, wherever an offload hook keeps it."""
        path, _, kind = name.rpartition(".")
        weight = kept(self.leaves[path], kind).detach()
        return weight[: self.spec.vocabulary] if name == self.spec.token_table else weight

    @torch.no_grad()
    def effective(self, name: str) -> Tensor:
        """As `read`, with the active LoRA adapters added in FP32 as PEFT's `merge` adds them."""
        weight = self.read(name)
        layer: Any = self.adapters.get(name.removesuffix(".weight"))
        for adapter in [] if layer is None else active_adapters(layer):
            down, up = (kept(m[adapter], "weight").float() for m in (layer.lora_A, layer.lora_B))
            delta = (up @ down) * layer.scaling[adapter]  # [out, in]
            weight = weight.to(delta) + (delta.T if layer.fan_in_fan_out else delta)
        return weight

    def adapter_refusal(self) -> str | None:
        """Why the adapters cannot be merged into an engine's weights, or None."""
        return next(filter(None, map(adapter_refusal, self.adapters.values())), None)

    def content(self) -> Hashable:
        """Digest of the weights without LoRA."""
        return self._watch.digest()

    def identity(self) -> tuple[Hashable, ...]:
        """What `effective` gives now, `content()` first: equal for equal values, wherever they lie.

        Changes in place show, so do a scale and a set of active adapters.
        """
        factors: list[Tensor] = []
        scales: list[tuple[str, float]] = []
        for name, layer in self.adapters.items():
            for adapter in active_adapters(layer):
                factors += [kept(m[adapter], "weight") for m in (layer.lora_A, layer.lora_B)]
                scales.append((name, float(layer.scaling[adapter])))
        if not factors:
            return (self.content(),)
        known, watches = self._factors
        # One that was cast, too, is watched anew.
        if watches is None or list(map(id, known)) != list(map(id, factors)) or not watches.look():
            watches = Watches(factors)
            self._factors = factors, watches
        return self.content(), tuple(scales), watches.digest()

    def lies_apart(self) -> bool:
        """Whether some of its weights are not in host memory."""
        return self._watch.lies_apart


def recognise(module: nn.Module, families: Sequence[Family]) -> Tower | str:
    """The text encoder that `module` is, or why it is left to PyTorch, as half a sentence."""
    kind: Any = type(module)
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        return "it is compiled (torch.compile)"
    for family in families:
        known: Any = family.known(module)
        if known is None:
            continue
        if kind.forward is not known.forward:
            return f"{kind.__name__} computes something of its own in forward"
        try:
            return _tower(module, family, known)
        except Unsupported as reason:
            return str(reason)
        except AttributeError as error:
            return f"its structure is not that of transformers' {known.__name__} ({error})"
    return f"{kind.__name__} is no text encoder that Octavo has engines for"


def outputs(name: str) -> Any:
    """The class `name` of transformers, whose model this is and which is loaded therefore."""
    return getattr(sys.modules["transformers.modeling_outputs"], name)


def _tower(module: Any, family: Family, known: type) -> Tower:
    spec = family.spec(module)
    names = dict.fromkeys(name.rpartition(".")[0] for name in spec.tensors())
    found = {name: family.leaf(module, name) for name in names}
    if (projection := getattr(module, "text_projection", None)) is not None:
        found[_PROJECTION] = projection
    adapters: dict[str, Any] = {n: m for n, m in found.items() if is_adapter(m)}
    leaves = {n: adapters[n].get_base_layer() if n in adapters else m for n, m in found.items()}
    dtypes = {name: {w.dtype for w in _plain(name, m, spec, family)} for name, m in leaves.items()}
    wide = {n for n in dtypes if family.wide is not None and n.endswith(family.wide)}
    narrow = set().union(*(d for n, d in dtypes.items() if n not in wide))
    if len(narrow) != 1 or any(dtypes[n] - narrow - {torch.float32} for n in wide):
        every = sorted(set().union(*dtypes.values()), key=str)
        raise Unsupported(f"its weights are of several dtypes ({', '.join(map(str, every))})")
    live = {id(part) for part in (*family.live(module), projection)}
    parts = [(name, part) for name, part in module.named_modules() if id(part) not in live]
    _check_parts(parts, {id(leaf) for leaf in leaves.values()}, family, known)
    classes = list({type(part): None for part in (module, *(part for _, part in parts))})
    for kind in classes:
        if not class_has_own_forward(kind):
            raise Unsupported(f"the forward of {kind.__name__} is replaced by another library")
    positions = family.positions(module)
    if positions is not None and not positions.holds():
        raise Unsupported("its positions are not 0, 1, 2, ...")
    inner = {id(m) for adapter in adapters.values() for m in adapter.modules()}
    holders = [m._modules for m in module.modules()]
    holders += [leaf._parameters for leaf in leaves.values() if id(leaf) not in live]
    holders += [hooks for _, p in parts for hooks in (p._forward_hooks, p._forward_pre_hooks)]
    places = [(holder, key, found) for holder in holders for key, found in holder.items()]
    places += _attentions(module, [part for _, part in parts])
    for _, part in parts:
        own, (slots, key) = part.__dict__, forward_slot(part)
        places += [(own, name, own[name]) for name in own.keys() & {"forward", *family.constants}]
        if slots is not own or key != "forward":  # under an offload hook
            places.append((slots, key, slots.get(key)))
    shape: Any = None if projection is None else leaves[_PROJECTION].weight.shape
    return Tower(
        family,
        spec,
        None if shape is None else (int(shape[0]), int(shape[1])),
        narrow.pop(),
        leaves,
        {name: layer for name, layer in adapters.items() if name != _PROJECTION},
        [holder for holder, _, _ in places],
        [key for _, key, _ in places],
        [found for _, _, found in places],
        [part.__dict__ for _, part in parts],
        [part.__dict__ for _, part in parts if _drops(part) and id(part) not in inner],
        classes,
        positions,
    )


def _attentions(module: Any, parts: Sequence[Any]) -> list[tuple[dict[str, Any], str, Any]]:
    """Where the configs name the attention that is computed, and its name. One of transformers'."""
    configs = [module.config, *(part.config for part in parts if "config" in part.__dict__)]
    found = []
    for config in {id(config): config.__dict__ for config in configs}.values():
        if (name := config.get(_ATTENTION)) not in _ATTENTIONS:
            raise Unsupported(f"its attention is '{name}', which is not one of transformers' own")
        found.append((config, _ATTENTION, name))
    return found


def _drops(part: nn.Module) -> bool:
    """Whether it drops values out in training mode. A LoRA's own dropout is `adapter_refusal`'s."""
    rate = part.p if type(part) is nn.Dropout else part.__dict__.get("dropout")
    return isinstance(rate, float | int) and rate > 0


def _plain(name: str, leaf: nn.Module, spec: EncoderSpec, family: Family) -> Iterator[Tensor]:
    """The weights of a leaf, all of them plain: one test for every way of quantizing."""
    if not family.is_plain(name, leaf):
        raise Unsupported(f"{name} is a {type(leaf).__module__}.{type(leaf).__name__}")
    shapes = {**spec.tensors(), PROJECTION: None, spec.token_table: None}
    wanted = [kind for kind in ("weight", "bias") if f"{name}.{kind}" in shapes]
    for kind in (k for k, p in leaf._parameters.items() if p is not None and k not in wanted):
        raise Unsupported(f"{name} has a {kind}")
    for kind in wanted:
        full = f"{name}.{kind}"
        if type(getattr(leaf, kind).data) is not Tensor:
            raise Unsupported(f"{full} is quantized ({type(getattr(leaf, kind).data).__name__})")
        weight = kept(leaf, kind)
        if weight.is_meta:
            raise Unsupported(f"{full} is on the meta device and holds no values")
        if weight.dtype not in DTYPES:
            raise Unsupported(f"{full} is {str(weight.dtype).removeprefix('torch.')}")
        if weight.is_inference() or not weight.is_contiguous():
            raise Unsupported(f"{full} is an inference tensor or not contiguous")
        if shapes[full] not in (None, tuple(weight.shape)):
            raise Unsupported(f"{full} has shape {tuple(weight.shape)}, not {shapes[full]}")
        yield weight


def _check_parts(
    parts: Sequence[tuple[str, nn.Module]], leaves: set[int], family: Family, known: type
) -> None:
    """Raise where another library replaced a part, or hooks into one that an engine leaves out."""
    in_adapters = {id(m) for _, part in parts if is_adapter(part) for m in part.modules()}
    for name, part in parts:
        kind = type(part)
        if not (
            kind.__module__ == known.__module__
            or kind is nn.ModuleList
            or kind.__name__ in family.parts
            or id(part) in leaves | in_adapters
        ):
            raise Unsupported(f"{name} is a {kind.__module__}.{kind.__name__}")
        for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values()):
            origin = str(getattr(hook, "__module__", None) or type(hook).__module__)
            # transformers' own hooks record hidden states where they are asked for
            if hook is not bring_home and not origin.startswith("transformers."):
                raise Unsupported(f"a hook of {origin} is on {name}")
        if not has_own_forward(part):
            raise Unsupported(f"the forward of {name} is replaced by another library")
        if others := foreign_hooks(part):
            raise Unsupported(f"a hook is on {name} ({', '.join(sorted(others))})")
