# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Serve a ComfyUI CLIP on FP8 engines, through its patcher and nothing else.

The seam is `patcher.set_injections`: while a patcher that carries ours is loaded, the `forward` of
each accelerated `X.transformer` is replaced on the instance, and that of the part which runs its
blocks (a CLIP's `text_model`, a T5's `encoder`) by one that does the same after a look at its
patches (Guard). The module tree and the state dict stay as they are, so LoRA, merging and saving
see what they always saw. The original forward answers every call that is not exactly the known one,
and everything that changes a module other than through its weights: hooks, bypass LoRA, foreign
patches. LoRA and merges come as `patcher.patches`: the engine then gets those weights. Read at
ComfyUI 0.33; only the comfy_* modules import it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
import weakref
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.model_management as management
import comfy.utils
import torch
from comfy.patcher_extension import CallbacksMP, PatcherInjection
from torch import nn

from ..accelerated import AcceleratedEncoder, EncoderReport, Patched
from ..choose import Packages
from ..compile import Progress, Report
from ..device import Device
from ..encoders import EncoderSpec, T5Spec
from ..engine_cache import EngineCache
from ..errors import Cancelled, OctavoError
from ..recipes import Floor, load_recipe
from . import comfy_memory
from .comfy_call import Call, T5Call, answer, answer_t5, parse, parse_t5
from .comfy_memory import (
    Companion,
    Models,
    is_prepared,
    load_embeddings_only,
    load_for_pytorch,
    loaded_patcher,
)
from .comfy_parts import Parts
from .comfy_source import (
    PatchedWeights,
    Source,
    digest_of,
    relevant_patches,
    sub_encoders,
    uses_projection,
)
from .comfy_specs import inner_of, inside, spec_of
from .comfy_texts import send_text

log = logging.getLogger(__name__)

KEY = "octavo"  # of our injections, our callback and our companion model

OTHER_CLONE = "another clone of this CLIP is loaded"
TEXT_INTERVAL_S = 0.2  # between two status texts of one phase
KEPT_DIGESTS = 32
# Dtypes under which T5.forward takes its embeddings as they are (comfy/text_encoders/t5.py).
_SAFE = (torch.float32, torch.float16, torch.bfloat16)


def facts(device: torch.device) -> tuple[Device | None, Packages | None]:
    """What to assume of `device` instead of looking. Tests replace this to serve on a CPU."""
    return None, None


@dataclass(frozen=True)
class Settings:
    """What a person chose on the node. `floor` 0 means the recipe's own."""

    precision: str = "auto"
    engine: str = "auto"
    background: bool = False
    floor: float = 0.0

    @property
    def recipe(self) -> str:
        return "fp8" if self.precision == "auto" else self.precision

    def floors(self, spec: EncoderSpec) -> Floor | None:
        if self.floor <= 0:
            return None
        recipe = load_recipe(self.recipe).of(spec).floor
        return Floor(self.floor, min(self.floor, recipe.token_min), self.floor)


# One encoder


class Served:
    """One sub-encoder with its engine, its state and the reason whenever PyTorch answers."""

    def __init__(
        self, source: Source, accelerated: AcceleratedEncoder, transformer: nn.Module
    ) -> None:
        self.source, self.accelerated = source, accelerated
        self.parts = Parts(transformer, inner_of(transformer), Guard)
        self.transformer = weakref.ref(transformer)
        self.why_host = ""  # why the last call was answered by PyTorch; "" if an engine did
        self.broken = ""  # a fault that keeps PyTorch in service
        self.pytorch_bytes = source.pytorch_bytes()
        self.prepared = False
        self._patches: OrderedDict[uuid.UUID, tuple[str, frozenset[str]] | None] = OrderedDict()

    @property
    def name(self) -> str:
        return self.source.name

    def report(self) -> EncoderReport:
        return self.accelerated.report()

    @property
    def has_engine(self) -> bool:
        """Whether an engine answers (or will, once it is loaded again)."""
        return self.prepared and not self.broken and self.accelerated.has_engine

    def patched(self, patcher: Any) -> Patched | None:
        """The weights under the patches of `patcher`, or None where those change nothing here."""
        if not patcher.patches:
            return None
        key = patcher.patches_uuid  # another one after every change of the patches
        if key not in self._patches:
            relevant = relevant_patches(self.source, patcher)
            known = (digest_of(relevant), frozenset(relevant)) if relevant else None
            self._patches[key] = known
            while len(self._patches) > KEPT_DIGESTS:
                self._patches.popitem(last=False)
        if (found := self._patches[key]) is None:
            return None
        # What is FP8 already and has no patch keeps its codes; the rest is quantized.
        changed = found[1] if self.source.is_fp8 else None
        return Patched(found[0], PatchedWeights(self.source, patcher), changed)


# The seam


class Seam:
    """Stands in for `transformer.forward` while its patcher is loaded."""

    def __init__(
        self, service: Service, served: Served, transformer: nn.Module, patcher: Any
    ) -> None:
        self._service, self._served = service, served
        self._transformer, self.patcher = weakref.ref(transformer), weakref.ref(patcher)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        transformer, patcher = self._transformer(), self.patcher()
        assert transformer is not None
        result = None
        if patcher is None:
            self._served.why_host = "the CLIP it was made for is gone"
        else:
            result = self._service.answer(self._served, transformer, patcher, args, kwargs)
        if result is None:
            return type(transformer).forward(transformer, *args, **kwargs)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _plain_forward(self._transformer(), memo)


def _plain_forward(module: Any, memo: dict[int, Any]) -> Any:
    """What a copy of `module`, in `memo` already, has in the place of our forward."""
    return type(module).forward.__get__(memo.get(id(module), module))


class Guard:
    """Stands in for `inner_of`'s forward: whoever runs PyTorch there finds its patches in place.

    A switch of LoRA under an engine leaves the weights that only PyTorch reads as they were, which
    saves a third of the time; they follow when they are asked for.
    """

    def __init__(self, inner: nn.Module, model: nn.Module) -> None:
        self._inner, self._model = weakref.ref(inner), weakref.ref(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inner, model = self._inner(), self._model()
        assert inner is not None and model is not None
        loaded = loaded_patcher(model)
        if loaded is not None:
            load_for_pytorch(loaded)
        return type(inner).forward(inner, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _plain_forward(self._inner(), memo)


def _foreign(transformer: nn.Module, patcher: Any, served: Served) -> str:
    """What changes this encoder other than through `patcher.patches`; "" if nothing does."""
    if patcher.current_hooks is not None or patcher.forced_hooks is not None or patcher.hook_backup:
        return "hooks are active on this CLIP"
    others = [key for key, injections in patcher.injections.items() if key != KEY and injections]
    if others:
        return f"other patches are injected into this CLIP ({', '.join(map(str, others))})"
    prefix = served.source.prefix
    for kind in (patcher.object_patches, patcher.weight_wrapper_patches):
        for key in kind:
            if key.startswith(prefix) or prefix.startswith(key + "."):
                return f"another node patches {key}"
    if transformer._forward_pre_hooks:
        return "another node hooks into the encoder"
    return served.parts.changed()


# One CLIP


class Service:
    """Everything Octavo holds for one loaded text model on one device under one set of settings."""

    def __init__(self, model: nn.Module, patcher: Any, settings: Settings) -> None:
        self.settings, self.device = settings, patcher.load_device
        self.model = weakref.ref(model)
        self.nodes: OrderedDict[str, None] = OrderedDict()  # our nodes that show this CLIP
        self.speed_up: float | None = None  # as 'FP8 Report' measured it
        self._vram_bytes: int | None = None
        self._shapes: set[Any] = set()  # requests that were served since the memory was counted
        self._reaching: OrderedDict[uuid.UUID, bool] = OrderedDict()  # see leaves_host_alone
        self.served: dict[str, Served] = {}
        self.unknown: dict[str, str] = {}  # sub-encoder -> what it is
        device, packages = facts(self.device)
        found = sub_encoders(model)
        for name, encoder in found.items():
            spec = spec_of(encoder.transformer)
            if isinstance(spec, str):
                self.unknown[name] = spec
                continue
            source = Source(
                name,
                encoder.transformer,
                spec,
                uses_projection(name, encoder, set(found)),
                self.device,
            )
            if fault := source.fault():
                self.unknown[name] = fault
                continue
            accelerated = AcceleratedEncoder(
                source,
                recipe=settings.recipe,
                engine=settings.engine,
                floor=settings.floors(spec),
                cache=cache(),
                background=settings.background,
                report=self.progress(),
                device=device,
                packages=packages,
            )
            self.served[name] = Served(source, accelerated, encoder.transformer)
        self.companion = Companion(self) if self.served else None

    # -- serving

    def answer(
        self, served: Served, transformer: Any, patcher: Any, args: Any, kwargs: Any
    ) -> Any | None:
        """What `transformer.forward` would return, or None where the original must say it."""
        spec = served.source.spec
        call: Call | T5Call | None
        if isinstance(spec, T5Spec):
            call = parse_t5(args, kwargs, spec)
        else:
            call = parse(args, kwargs, spec)
        served.why_host = (
            served.broken
            or ("the call is not one that Octavo knows" if call is None else "")
            or ("" if loaded_patcher(patcher.model) is patcher else OTHER_CLONE)
            or _foreign(transformer, patcher, served)
        )
        if served.why_host or call is None:
            return None
        management.throw_exception_if_processing_interrupted()
        first = not served.prepared
        served.source.look_through(patcher)
        try:
            # What an engine keeps must be ordinary tensors: inference tensors cannot change later.
            with torch.inference_mode(False), torch.no_grad():
                patched = served.patched(patcher)
                if first:
                    self.prepare(served)
                embeds = call.embeds
                if isinstance(call, T5Call) and transformer.dtype not in _SAFE:
                    embeds = torch.nan_to_num(embeds)  # as T5.forward does
                result = served.accelerated.attempt(embeds, call.mask, patched)
                self._count(served, call.embeds.shape, patched)
                if result is None:
                    served.why_host = self._why_host(served, patched)
                    return None
                if isinstance(call, T5Call):
                    return answer_t5(result[1])
                states = answer(
                    call,
                    *result,
                    norm=transformer.text_model.final_layer_norm,
                    project=transformer.text_projection,
                )
        except Cancelled:
            raise management.InterruptProcessingException() from None
        except OctavoError as error:
            served.broken = served.why_host = str(error)
            log.warning("%s", error)
            self.show()
            return None
        except Exception as error:
            served.broken = served.why_host = (
                f"an unexpected fault ({type(error).__name__}: {error})"
            )
            log.exception("%s: PyTorch serves from now on", served.name)
            self.show()
            return None
        management.throw_exception_if_processing_interrupted()
        return states

    def _count(self, served: Served, shape: Any, patched: Patched | None) -> None:
        """Count the memory again after the first request of its kind: a graph, a set of weights."""
        kind = (served.name, tuple(shape), patched.identity if patched else None)
        if kind not in self._shapes:
            if len(self._shapes) > 256:
                self._shapes.clear()
            self._shapes.add(kind)
            self._vram_bytes = None

    def _why_host(self, served: Served, patched: Patched | None) -> str:
        report = served.report()
        if report.engine == "host":
            return report.refusals[-1].reason if report.refusals else "no engine can serve here"
        if patched is not None:
            return "FP8 of the patched weights is not close enough to FP32"
        return "the shape or the mask is one that the engine was not built for"

    def prepare(self, served: Served | None = None) -> None:
        """Choose, build and prove the engines now (all of them, or one)."""
        for each in [served] if served else self.served.values():
            if each.prepared or each.broken:
                continue
            with torch.inference_mode(False), torch.no_grad():
                each.accelerated.prepare()
            each.prepared = True
        # What the check in FP32 took is of no more use to us, but to others.
        management.soft_empty_cache()
        self.memory_changed()
        self.show()

    # -- what a person sees

    def lines(self) -> list[str]:
        """The state of each sub-encoder, one line each."""
        shown = [_line(served) for served in self.served.values()]
        shown += [f"{name}: PyTorch; it is {what}" for name, what in self.unknown.items()]
        if self.speed_up is not None:
            shown.append(f"{self.speed_up:.1f} times as fast as PyTorch")
        return shown

    def show(self, text: str | None = None) -> None:
        """Put the state, or `text`, onto the nodes that show this CLIP."""
        text = "\n".join(self.lines()) if text is None else text
        for node in self.nodes:
            send_text(text, node)

    def progress(self) -> Report:
        bars: dict[str, Any] = {}
        last: tuple[str, float] = ("", 0.0)

        def report(progress: Progress) -> None:
            nonlocal last
            in_background = threading.current_thread().name == "octavo-build"
            if not in_background:
                management.throw_exception_if_processing_interrupted()
            now = time.monotonic()
            if last[0] != progress.phase or now - last[1] >= TEXT_INTERVAL_S:
                last = (progress.phase, now)
                part = f" {100 * progress.done // progress.total}%" if progress.total else ""
                self.show(f"{progress.subject}: {progress.phase}{part}")
            if in_background or not progress.total:
                return
            for node in self.nodes:
                if node not in bars:
                    bars[node] = comfy.utils.ProgressBar(progress.total, node_id=node)
                with suppress(KeyError):  # a node that is not in the graph which runs now
                    bars[node].update_absolute(progress.done, progress.total)

        return report

    # -- the patcher's side

    def attach(self, patcher: Any) -> None:
        """Carry this service on `patcher`, a fresh clone, and on every clone of it."""
        detach_service(patcher)
        patcher.set_injections(KEY, [PatcherInjection(inject=self.inject, eject=self.eject)])
        if self.companion is not None:
            patcher.set_model_patch(Models(self.companion), KEY)
        patcher.add_callback_with_key(
            CallbacksMP.ON_CLONE, KEY, lambda _, clone: self.keep_off(clone)
        )
        self.keep_off(patcher)

    def inject(self, patcher: Any) -> None:
        model = self.model()
        if model is None or patcher.model is not model:
            return  # a clone over another module (SelectCLIPDevice): that one stays PyTorch
        for name, served in self.served.items():
            transformer = served.transformer()
            now: Any = getattr(getattr(model, name, None), "transformer", None)
            if transformer is None or now is not transformer:
                served.why_host = "another node replaced the encoder"
                continue  # what is there now stays PyTorch
            there = transformer.__dict__.get("forward")
            if there is None or isinstance(there, Seam):
                transformer.__dict__["forward"] = Seam(self, served, transformer, patcher)
            else:
                served.why_host = "another node replaced the encoder's forward"
            inner = inner_of(transformer)
            if isinstance(inner.__dict__.get("forward"), Guard | None):
                inner.__dict__["forward"] = Guard(inner, model)

    def eject(self, patcher: Any) -> None:
        for name in self.served:
            try:
                transformer = patcher.model.get_submodule(name).transformer
                # Whoever injected it: without it PyTorch answers, which is never wrong.
                for module in (transformer, inner_of(transformer)):
                    if isinstance(module.__dict__.get("forward"), Seam | Guard):
                        del module.__dict__["forward"]
            except (AttributeError, TypeError):  # another node replaced it, or Python is ending
                continue

    def keep_off(self, patcher: Any) -> None:
        """Load no more of `patcher` than is needed while engines serve all of it.

        ComfyUI prepares all weights anew before every encode, which takes longer than the encode.
        """
        if "partially_load" in patcher.__dict__ or not hasattr(patcher, "partially_load"):
            return
        ours = weakref.ref(patcher)

        def partially_load(device_to: Any, *args: Any, **kwargs: Any) -> Any:
            patcher: Any = ours()
            alone = self.leaves_host_alone(patcher)
            forced = kwargs.get("force_patch_weights") or (len(args) > 1 and args[1])
            if forced or not self.serves_all(patcher):
                return type(patcher).partially_load(patcher, device_to, *args, **kwargs)
            if alone and is_prepared(patcher, device_to):
                with patcher.use_ejected(skip_and_inject_on_exit_only=True):
                    patcher.unpatch_model(patcher.offload_device, unpatch_weights=False)
                    patcher.patch_model(load_weights=False)
                return 0
            if patcher.is_dynamic() or comfy_memory.is_ram(device_to):
                return type(patcher).partially_load(patcher, device_to, *args, **kwargs)
            return load_embeddings_only(patcher, device_to)

        patcher.partially_load = partially_load

    def leaves_host_alone(self, patcher: Any) -> bool:
        """Whether what ComfyUI itself reads is the same under these patches and those loaded now.

        That is everything but the blocks of the accelerated encoders and what goes with them.
        """
        wanted, loaded = patcher.patches_uuid, patcher.model.current_weight_patches_uuid
        if wanted not in self._reaching:
            ours = tuple(
                s.source.prefix + part
                for s in self.served.values()
                for part in inside(s.source.spec)
            )
            self._reaching[wanted] = any(not key.startswith(ours) for key in patcher.patches)
            while len(self._reaching) > KEPT_DIGESTS:
                self._reaching.popitem(last=False)
        return bool(loaded == wanted) or not (
            self._reaching[wanted] or self._reaching.get(loaded, True)
        )

    def serves_all(self, patcher: Any) -> bool:
        """Whether no PyTorch of this CLIP is expected to run."""
        return (
            not self.unknown
            and KEY in patcher.injections
            and len(patcher.injections) == 1
            and patcher.forced_hooks is None
            and all(s.has_engine and not s.why_host for s in self.served.values())
        )

    @property
    def vram_bytes(self) -> int:
        """Device memory of all engines; ComfyUI asks several times per prompt, so it is kept."""
        if self._vram_bytes is None:
            self._vram_bytes = sum(s.accelerated.vram_bytes for s in self.served.values())
        return self._vram_bytes

    def memory_changed(self) -> None:
        self._vram_bytes = None
        self._shapes.clear()

    def close(self) -> None:
        for served in self.served.values():
            served.accelerated.close()
        self.companion = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Service:
        """Itself, which serves this model alone: a copy of the CLIP is PyTorch's."""
        return self


def _line(served: Served) -> str:
    """Engine, similarity and memory of one encoder, or why PyTorch serves it."""
    report = served.report()
    if served.broken:
        return f"{served.name}: PyTorch; {served.broken}"
    if not served.prepared:
        return f"{served.name}: FP8 from the first prompt on"
    if report.engine == "host":
        reason = report.refusals[-1].reason if report.refusals else "no engine can serve here"
        return f"{served.name}: PyTorch; {reason}"
    parts = [f"{served.name}: {report.engine}"]
    if report.recipe not in (None, "fp8"):
        parts[0] += f" ({report.recipe})"
    if report.similarity is not None:
        parts.append(f"similarity {report.similarity.token_mean:.4f}")
    if report.vram_bytes:
        saved = served.pytorch_bytes - report.vram_bytes
        less = f" ({saved / 1e6:.0f} MB saved)" if saved > 0 else ""  # none of what is FP8 already
        parts.append(f"{report.vram_bytes / 1e6:.0f} MB of VRAM{less}")
    return ", ".join(parts)


# The entries for the nodes

# (id of the text model, settings, device) -> its service, for as long as the model lives.
_services: dict[tuple[int, Settings, str], Service] = {}


def accelerate(
    clip: Any, settings: Settings, build: str = "on first use", node: str | None = None
) -> tuple[Any, str]:
    """(a clone of `clip` that is served by Octavo, what is so far known of it as text).

    Nothing heavy happens here unless `build` is "now". A CLIP that Octavo cannot serve comes back
    as a plain clone, with the reason.
    """
    clone = clip.clone()
    model = getattr(getattr(clone, "patcher", None), "model", None)
    if not isinstance(model, nn.Module) or not sub_encoders(model):
        text = "This CLIP holds no text encoder that Octavo knows; it is unchanged."
        return _plain(clone, text, node)
    device = clone.patcher.load_device
    if management.is_device_cpu(device) and facts(device)[0] is None:
        text = "ComfyUI runs this text encoder on the CPU, which has no FP8; it is unchanged."
        return _plain(clone, text, node)
    try:
        service = service_for(clone.patcher, settings)
    except OctavoError as error:  # the cache that the environment names cannot be
        return _plain(clone, f"PyTorch serves this CLIP: {error}", node)
    if node is not None:
        service.nodes.pop(node, None)
        service.nodes[node] = None
        while len(service.nodes) > 8:
            service.nodes.popitem(last=False)
    if service.served:
        service.attach(clone.patcher)
        if build == "now":
            for served in service.served.values():
                served.source.look_through(clone.patcher)
            _make_room(service)
            service.prepare()
    service.show()
    return clone, "\n".join(service.lines())


def _plain(clone: Any, text: str, node: str | None) -> tuple[Any, str]:
    if node is not None:
        send_text(text, node)
    return clone, text


def _make_room(service: Service) -> None:
    if service.companion is not None and not management.is_device_cpu(service.device):
        management.load_models_gpu([service.companion])


def service_for(patcher: Any, settings: Settings) -> Service:
    """The one service of this model, these settings and this device; it ends with the model."""
    model = patcher.model
    key = (id(model), settings, str(patcher.load_device))
    if key not in _services:
        _services[key] = Service(model, patcher, settings)

        def forget() -> None:
            service = _services.pop(key, None)
            if service is not None:
                service.close()

        weakref.finalize(model, forget).atexit = False
    return _services[key]


def service_of(clip: Any) -> Service | None:
    """The service that a CLIP carries, if it went through our node."""
    patcher = getattr(clip, "patcher", None)
    for injection in (getattr(patcher, "injections", None) or {}).get(KEY, []):
        owner = getattr(injection.inject, "__self__", None)
        if isinstance(owner, Service):
            return owner
    return None


def detach_service(patcher: Any) -> None:
    """Take what `Service.attach` put there off `patcher` (not off its clones)."""
    if patcher.is_injected:
        patcher.eject_model()
    patcher.remove_injections(KEY)
    patcher.model_options["transformer_options"].get("patches", {}).pop(KEY, None)
    patcher.remove_callbacks_with_key(CallbacksMP.ON_CLONE, KEY)
    patcher.__dict__.pop("partially_load", None)


def without(clip: Any) -> Any:
    """A clone of `clip` that ComfyUI alone serves."""
    clone = clip.clone()
    detach_service(clone.patcher)
    return clone


def cache() -> EngineCache:
    """The cache in ComfyUI's models folder (`octavo` in extra_model_paths.yaml moves it)."""
    if os.environ.get("OCTAVO_CACHE"):
        return EngineCache()
    import folder_paths

    if "octavo" not in folder_paths.folder_names_and_paths:
        place = os.path.join(folder_paths.models_dir, "octavo")
        folder_paths.folder_names_and_paths["octavo"] = ([place], {".plan"})
    return EngineCache(Path(folder_paths.get_folder_paths("octavo")[0]))
