# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Serve the text encoders of a diffusers pipeline, or one transformers model, on engines.

The seam is the instance's `forward`, in the slot that offload hooks call last; module tree, state
dict, config and hooks stay as they are. An engine answers the calls it was built for, under the
weights that the model has at that moment; the model's own PyTorch answers all others, as before.
diffusers is never imported: a pipeline is whatever has `components`.
"""

from __future__ import annotations

import gc
import inspect
import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ..accelerated import AcceleratedEncoder, EncoderReport, Hidden, Patched, Refusal
from ..choose import VARIABLE, Packages, requested
from ..compile import Report, silent
from ..device import Device
from ..encoders import ClipSpec, T5Spec
from ..encoders.clip import PROJECTION
from ..engine_cache import EngineCache
from ..errors import OctavoBug, OctavoError
from ..recipes import Floor, load_recipe
from .encoder_call import Call, parse
from .families import family_of, tower_of
from .hooks import comes_and_goes, forward_slot, has_own_forward, is_managed
from .parking import park, unpark
from .tower import Tower

log = logging.getLogger(__name__)

T = TypeVar("T")
Rows = tuple[tuple[int, ...], ...]

__all__ = ["accelerate", "accelerating", "report", "restore"]


def facts(device: torch.device) -> tuple[Device | None, Packages | None]:
    """What to assume of `device` instead of looking. Tests replace it to serve on a CPU."""
    return None, None


def accelerate(
    pipe: T,
    *,
    components: str | Sequence[str] | None = None,
    recipe: str = "fp8",
    engine: str = "auto",
    calibration_prompts: str | Sequence[str] | None = None,
    floor: Floor | None = None,
    cache: EngineCache | str | os.PathLike[str] | None = None,
    background: bool = False,
    progress: Report | None = None,
) -> T:
    """Serve the text encoders of `pipe` on engines, in place; returns `pipe`.

    `pipe`: a diffusers pipeline, or one CLIPTextModel, CLIPTextModelWithProjection,
    T5EncoderModel, MT5EncoderModel or UMT5EncoderModel.
    `components`: names such as "text_encoder_2"; by default all that can be served, while others
    keep PyTorch with one log line each. `calibration_prompts` widen the input ranges found with
    Octavo's own prompts. The other options are those of `AcceleratedEncoder`. The first prompt
    chooses the engine and builds or loads it, on the device it runs on. A second call changes the
    options, and has an encoder without an engine look for one again; an encoder that pipelines
    share has one engine and the options given last.

    Raises OctavoError for a pipeline without text encoders, for a named component that cannot be
    served, and for options that make no sense (in OCTAVO_ENGINE, OCTAVO_CACHE and
    OCTAVO_CACHE_BUDGET too).
    """
    load_recipe(recipe)
    requested(engine, os.environ.get(VARIABLE))
    if floor is not None and not isinstance(floor, Floor):
        raise OctavoError(
            f"floor is {floor!r}, and three cosines are needed; give "
            "octavo.recipes.Floor(token_mean=0.99, token_min=0.95, pooled=0.99)."
        )
    texts = _texts("calibration_prompts", calibration_prompts, "texts") or []
    store = _store(cache)
    found = _text_encoders(pipe)
    named = _texts("components", components, "names of text encoders")
    if named is not None and not named:  # as of a filter that let nothing through
        raise OctavoError("components is empty; name text encoders, or leave it out.")
    if isinstance(pipe, nn.Module):
        named = list(found)
    for name in found if named is None else named:
        module = found.get(name)
        if module is None:
            if named is None:
                continue  # loaded without it: its embeddings come from elsewhere
            there = ", ".join(n for n, m in found.items() if m is not None) or "none"
            raise OctavoError(f"the pipeline has no text encoder '{name}' loaded; it has {there}.")
        refusal = _refusal(module)
        if refusal is None:
            tokens = _tokens(pipe, name, module, texts)
            options = _Options(
                recipe, engine, tokens, floor, background, store.root, store, progress or silent
            )
            _attach(name, module, options).owners.add(pipe)
        elif named is None:
            log.warning("%s: PyTorch keeps serving it: %s", name, refusal)
        else:
            raise OctavoError(f"{name} cannot be accelerated: {refusal}; leave it to PyTorch.")
    return pipe


def restore(pipe: T) -> T:
    """Undo `accelerate`: PyTorch serves, every weight is back where it was; returns `pipe`.

    An encoder that another accelerated pipeline shares stays accelerated. Otherwise a no-op.
    """
    for module in _text_encoders(pipe).values():
        served = None if module is None else _served(module)
        if module is not None and served is not None:
            served.owners.discard(pipe)
            if not served.owners:
                _detach(module, served)
    return pipe


@contextmanager
def accelerating(pipe: T, **options: Any) -> Iterator[T]:
    """`accelerate(pipe, **options)` for the length of a `with` block.

    What was accelerated before stays so afterwards, with the new options.
    """
    served = [_served(m) for m in _text_encoders(pipe).values() if m is not None]
    before = any(s is not None and pipe in s.owners for s in served)
    try:
        yield accelerate(pipe, **options)
    finally:
        if not before:
            restore(pipe)


def report(pipe: Any) -> dict[str, EncoderReport]:
    """How each text encoder is served now, and why not better; `.text()` of each is for people."""
    reports = {}
    for name, module in _text_encoders(pipe).items():
        if module is None:
            continue
        served = _served(module)
        if served is not None:
            reports[name] = replace(served.report(_inner(module)), name=name)
            continue
        reason = _refusal(module) or "it is not accelerated; call octavo.accelerate(pipe)"
        refusal = Refusal("any engine", "any recipe", reason)
        reports[name] = EncoderReport(name, _family(module), "host", refusals=(refusal,))
    return reports


# Finding encoders


def _inner(module: nn.Module) -> nn.Module:
    """The model inside torch.compile's wrapper."""
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


def _family(module: nn.Module) -> str:
    tower = tower_of(module)
    return tower.spec.family if isinstance(tower, Tower) else type(_inner(module)).__name__


def _text_encoders(pipe: Any) -> dict[str, nn.Module | None]:
    """Component name -> text encoder, or None for one that is not loaded."""
    kind = type(pipe).__name__
    if isinstance(pipe, nn.Module):
        return {type(_inner(pipe)).__name__: pipe}
    parts = getattr(pipe, "components", None)
    if not isinstance(parts, Mapping):
        raise OctavoError(
            f"a {kind} cannot be accelerated; give a diffusers pipeline or a transformers model."
        )
    found = {
        name: part
        for name, part in parts.items()
        if name.startswith("text_encoder") and (part is None or isinstance(part, nn.Module))
    }
    if not found:
        raise OctavoError(f"a {kind} has no text encoder; its components are {', '.join(parts)}.")
    return found


def _refusal(module: nn.Module) -> str | None:
    """Why `module` cannot be accelerated, or None."""
    if _served(module) is not None:
        return None
    found = tower_of(module)
    if isinstance(found, str):
        return found
    slots, key = forward_slot(module)
    if has_own_forward(module) or isinstance(slots.get(key), _Forward):  # a shallow copy's
        return None
    return "its forward is replaced by another library"


def _store(cache: Any) -> EngineCache:
    """The cache that is meant; a variable that names none is refused now and not at a prompt."""
    if cache is None:
        return EngineCache()
    if isinstance(cache, EngineCache):
        return cache
    if not isinstance(cache, str | os.PathLike):
        raise OctavoError(f"cache is {cache!r}; name a folder, or leave it out.")
    if not os.fspath(cache):  # as of an unset variable; it would be the current folder
        raise OctavoError("cache is empty; name a folder, or leave it out.")
    return EngineCache(Path(cache))


def _texts(option: str, given: Any, what: str) -> list[str] | None:
    """One text or several as a list of them; None for None."""
    if given is None:
        return None
    several = isinstance(given, Iterable) and not isinstance(given, str)
    found = list(given) if several else [given]
    for one in found:
        if not isinstance(one, str):
            raise OctavoError(f"{option} hold {one!r}; they must be {what}.")
    return found


def _tokens(pipe: Any, name: str, module: nn.Module, prompts: Sequence[str]) -> Rows:
    """The user's prompts as rows of token ids, by the pipeline's own tokenizer."""
    if not prompts:
        return ()
    tokenizer = getattr(pipe, name.replace("text_encoder", "tokenizer"), None)
    if tokenizer is None:
        raise OctavoError(
            f"calibration_prompts need a tokenizer and {name} has none; give the whole pipeline."
        )
    tower = tower_of(_inner(module))
    if isinstance(tower, str):
        raise OctavoError(f"calibration_prompts cannot be used now: {tower}.")
    spec = tower.spec
    # CLIP's rows are always filled up, T5's as far as the longest of them
    fill = "max_length" if isinstance(spec, ClipSpec) else "longest"
    rows = tokenizer(prompts, padding=fill, truncation=True, max_length=spec.longest)
    # Tokens of textual inversion may be gone tomorrow: the last token stands for them, which is
    # CLIP's end token.
    return tuple(tuple(min(int(i), spec.vocabulary - 1) for i in row) for row in rows.input_ids)


# Attaching


_interpreter = getattr(
    getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: None
)


def _is_transformed() -> bool:
    """Whether PyTorch traces, transforms or differentiates what it is called for.

    torch.compile, torch.export, torch.jit.trace, torch.func, forward-mode gradients.
    """
    return bool(
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None  # torch.jit.trace
        or _interpreter() is not None
        or getattr(forward_ad, "_current_level", -1) >= 0
    )


@dataclass(frozen=True)
class _Options:
    recipe: str
    engine: str
    tokens: Rows
    floor: Floor | None
    background: bool
    root: Path
    cache: EngineCache = field(compare=False)
    progress: Report = field(compare=False)


class _Forward:
    """Lies where the model's `forward` was. Knows the model weakly: neither keeps the other alive.

    `__slots__`, because accelerate and diffusers copy the `__dict__` of what they wrap. A copy or a
    pickle of the model gets the forward of its class: only this very model is accelerated. A
    shallow copy has this one; it gets the forward of its class when the model is gone.
    """

    __slots__ = ("__weakref__", "_kind", "_model", "_served")

    def __init__(self, model: nn.Module, served: _Served) -> None:
        self._model, self._served = weakref.ref(model), served
        self._kind = type(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _is_transformed() or self._served.off or (model := self._model()) is None:
            function, model = self._plain()
            return function(model, *args, **kwargs)
        return self._served(model, args, kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        function, model = self._plain()
        return inspect.signature(partial(function, model))

    @property
    def __code__(self) -> Any:
        """For torch.export, which names what it exports by it."""
        return self._kind.forward.__code__

    def _plain(self) -> tuple[Any, nn.Module]:
        model = self._model()
        if model is None:
            model = self._heir()
        return self._kind.forward, model

    def _heir(self) -> nn.Module:
        """A shallow copy that outlived the model; every one gets the forward of its class."""
        same = [one for one in gc.get_objects() if type(one) is self._kind]
        heirs = [one for one in same if _take_off(one, self)]
        if not heirs:
            raise OctavoBug("a text encoder is used after it was freed")
        self._model = weakref.ref(heirs[0])
        return heirs[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        function, model = self._plain()
        return partial(function, memo.get(id(model), model))

    def __reduce__(self) -> Any:
        return partial, self._plain()


# What is accelerated. Beside the model, not in it: nothing of ours may show among its attributes.
_registry: weakref.WeakKeyDictionary[nn.Module, _Served] = weakref.WeakKeyDictionary()


def _served(module: nn.Module) -> _Served | None:
    return _registry.get(_inner(module))


def _attach(name: str, module: nn.Module, options: _Options) -> _Served:
    module = _inner(module)
    served = _registry.get(module)
    if served is None:
        served = _registry[module] = _Served(name, options)
        slots, key = forward_slot(module)
        slots[key] = _Forward(module, served)
        served.finalizer = weakref.finalize(module, served.end)
        served.finalizer.atexit = False
    elif served.options != options:
        served.close()
        served.options = options
    else:
        served.again = True
    return served


def _detach(module: nn.Module, served: _Served) -> None:
    module = _inner(module)
    slots, key = forward_slot(module)
    if isinstance(ours := slots.get(key), _Forward):
        _take_off(module, ours)
    served.finalizer.detach()
    served.end()
    del _registry[module]
    _unpark(module)


def _take_off(module: nn.Module, ours: _Forward) -> bool:
    """Put the forward of its class where `ours` lies in `module`; False if it does not."""
    slots, key = forward_slot(module)
    if slots.get(key) is not ours:
        return False
    if slots is module.__dict__ and key == "forward":
        del slots[key]
    else:
        slots[key] = type(module).forward.__get__(module)
    return True


def _unpark(module: Any) -> None:
    family = family_of(module)
    unpark(module, family.parkable(module), family.table(module).weight.device)


# Serving


class _Host:
    """The live model as AcceleratedEncoder wants its host; `tower` as found at the last call."""

    def __init__(self, name: str, tower: Tower, device: torch.device) -> None:
        self.name, self.tower, self.device = name, tower, device
        self.spec, self.projection_shape = tower.spec, tower.projection_shape
        self.content = tower.content()
        self.changed = False  # other weights lie in the model than the engine was made from ...
        self.was_asked = False  # ... and an engine is to be made anew

    def read(self, name: str) -> Tensor:
        if self.changed and name not in (self.spec.token_table, PROJECTION):
            self.was_asked = True
            raise OctavoError(f"{self.name}: its weights have changed since they were read first.")
        return self.tower.read(name)

    def encode(self, embeds: Tensor, mask: Tensor | None) -> tuple[Hidden, Tensor]:
        raise OctavoBug("the model's own forward answers what no engine does")

    def suits(self, tower: Tower, device: torch.device) -> bool:
        """Whether an engine made for this host is one for `tower` on `device`."""
        if tower is self.tower:
            return device == self.device
        now, then = ((t.spec, t.projection_shape, t.dtype) for t in (tower, self.tower))
        return now == then and device == self.device


class _Served:
    """One model with its engine. Thread-safe; PyTorch's answers run outside the lock."""

    def __init__(self, name: str, options: _Options) -> None:
        self.name, self.options = name, options
        self.owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self.finalizer: Any = None
        self.off = False
        self.count = 0  # requests that an engine answered
        self.reasons: Counter[str] = Counter()  # why PyTorch answered the others
        self._lock = threading.RLock()
        self._in_pytorch = 0
        self._tower: Tower | None = None
        self._host: _Host | None = None
        self._encoder: AcceleratedEncoder | None = None
        self._without_engine = False  # none serves here, nor will one come ...
        self.again = False  # ... unless the user has asked for one since: the disk was full, say

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        grad = torch.is_grad_enabled()
        with self._lock:
            if grad or torch.is_inference_mode_enabled():
                # Never in inference mode: what is made now must stay writable outside of it.
                with torch.inference_mode(False), torch.no_grad():
                    answer = self._answer(model, args, kwargs, grad)
            else:
                answer = self._answer(model, args, kwargs, grad)
            if not isinstance(answer, str):
                self.count += 1
                return answer
            if answer and not self.reasons[answer]:
                log.warning("%s: PyTorch answers: %s", self.name, answer)
            self.reasons[answer] += 1
            self._in_pytorch += 1
        try:
            return type(model).forward(model, *args, **kwargs)
        finally:
            with self._lock:
                self._in_pytorch -= 1

    def _answer(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool) -> Any:
        """An engine's answer as the model's class gives it, or why PyTorch must; "" is reported."""
        tower = self._current(model)
        if isinstance(tower, str):
            return tower
        family = tower.family
        call = parse(family, family.configs(model), args, kwargs)
        if isinstance(call, str):
            return call
        if (reason := _refused(model, tower, call, grad)) is not None:
            return reason
        if tower.adapters:
            _unpark(model)  # PEFT fuses where the weights are
        embeds = family.table(model)(call.ids)  # [B, S, C]
        device = embeds.device
        if embeds.dtype != tower.dtype or torch.is_autocast_enabled(device.type):
            return "autocast is on, or the token embeddings are of another dtype"
        states = self._states(tower, embeds, call.mask)
        if states is None:
            return ""
        if (
            device.type == "cuda"
            and tower.lies_apart()
            and not (tower.adapters or self._in_pytorch or is_managed(model))
        ):
            park(family.parkable(model), device)
        output = family.output(model, call, *states, embeds.dtype)
        if isinstance(tower.spec, T5Spec) and self._encoder is not None and comes_and_goes(model):
            # The user needs the room: a T5-XXL holds 4.7 GB, and comes back within a second.
            self._encoder.rest()
        return output

    def _current(self, model: Any) -> Tower | str:
        if self._tower is None or not self._tower.is_current():
            self._tower = None  # of which the old weights are freed first
            found = tower_of(model)
            if isinstance(found, str):
                return found
            self._tower = found
        return self._tower

    def _states(
        self, tower: Tower, embeds: Tensor, mask: Tensor | None
    ) -> tuple[Hidden, Tensor] | None:
        """(hidden states, final state) from an engine, or None where PyTorch must answer."""
        again, self.again = self.again, False
        if again and (one := self._encoder) is not None and not one.has_engine and one.wait(0):
            self.close()
        host, encoder, device = self._host, self._encoder, embeds.device
        if host is None or encoder is None or not host.suits(tower, device):
            if (
                encoder is not None
                and host is not None
                and device.type == "cpu" != host.device.type
            ):
                encoder.rest()  # the user took the model off the GPU
                return None
            self.close()
            self._host = host = _Host(self.name, tower, device)
            self._encoder = encoder = self._made(host)
        if self._without_engine:
            return None
        host.tower = tower
        identity = tower.identity()
        host.changed = identity[0] != host.content
        patched = None if identity == (host.content,) else Patched(identity, tower.effective)
        states = encoder.attempt(embeds, mask, patched)
        if states is None and host.was_asked:
            self.close()  # the next request starts from the weights that are there now
        elif states is None and not self.options.background:
            self._without_engine = encoder.report().engine == "host"
        return states

    def _made(self, host: _Host) -> AcceleratedEncoder:
        options, (device, packages) = self.options, facts(host.device)
        return AcceleratedEncoder(
            host,
            recipe=options.recipe,
            engine=options.engine,
            floor=options.floor,
            cache=options.cache,
            background=options.background,
            report=options.progress,
            calibration=options.tokens,
            device=device,
            packages=packages,
        )

    def report(self, model: nn.Module) -> EncoderReport:
        with self._lock:
            recipe = self.options.recipe
            if self._encoder is None:
                first = Refusal("any engine", recipe, "the first prompt chooses the engine")
                known = EncoderReport(self.name, _family(model), "host", refusals=(first,))
            else:
                known = self._encoder.report()
            counted = tuple(
                Refusal("any engine", recipe, f"{reason} ({count} requests)")
                for reason, count in self.reasons.items()
                if reason
            )
            return replace(known, refusals=known.refusals + counted)

    def end(self) -> None:
        """Free the engine for good: another library may have wrapped our forward and call it."""
        self.off = True
        self.close()

    def close(self) -> None:
        """Free the engine; the next request makes a new one."""
        with self._lock:
            encoder, self._encoder, self._host, self._without_engine = (
                self._encoder,
                None,
                None,
                False,
            )
            if encoder is not None:
                encoder.close()


def _refused(model: Any, tower: Tower, call: Call, grad: bool) -> str | None:
    """Why PyTorch must answer `call`, or None."""
    if model.training or tower.is_training():
        return "the model is in training mode"
    if grad and tower.is_trained():
        return "gradients are on; call it under torch.no_grad()"
    if call.hidden and not tower.family.keeps_hidden:
        return "the call asks for hidden states, and its engines give only the last one"
    if call.blank and tower.dtype == torch.float16:  # there transformers' versions differ
        return "the attention mask leaves nothing of a row, and the model is in fp16"
    return tower.adapter_refusal()
