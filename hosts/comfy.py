# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Serve a ComfyUI CLIP on FP8 engines, through its patcher and nothing else.

The seam is `patcher.set_injections`: while a patcher that carries ours is loaded, the `forward` of
each accelerated `X.transformer` is replaced on the instance. The module tree and the state dict
stay as they are, so LoRA, merging and saving see what they always saw. The original forward answers
every call that is not exactly the known one, and everything that changes a module other than
through its weights: hooks, bypass LoRA, foreign patches. LoRA and merges come as `patcher.patches`:
the engine then gets those weights. This is the only module that imports `comfy` (0.33).
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache as remember
from pathlib import Path
from typing import Any, Literal, cast

import comfy.clip_model
import comfy.lora
import comfy.model_management as management
import comfy.model_patcher
import comfy.sd1_clip
import comfy.utils
import torch
from comfy.patcher_extension import CallbacksMP, PatcherInjection
from torch import Tensor, nn

from ..accelerated import AcceleratedEncoder, EncoderReport, Patched
from ..choose import Packages
from ..compile import Progress, Report
from ..device import Device
from ..encoders import ClipSpec
from ..encoders.clip import PROJECTION, TOKENS
from ..engine_cache import EngineCache
from ..errors import Cancelled, FileError, OctavoError
from ..recipes import Floor, load_recipe
from .comfy_call import answer, parse

log = logging.getLogger(__name__)

KEY = "octavo"  # of our injections, our callback and our companion model
BUILDS = ("on first use", "now", "background")
PRECISIONS = ("auto", "fp8", "fp8-mixed", "bf16")
Build = Literal["on first use", "now", "background"]

TEXT_INTERVAL_S = 0.2  # between two status texts of one phase
KEPT_DIGESTS = 32
_READABLE = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


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

    def floors(self) -> Floor | None:
        if self.floor <= 0:
            return None
        recipe = load_recipe(self.recipe).floor
        return Floor(self.floor, min(self.floor, recipe.token_min), self.floor)


# What a CLIP holds


def sub_encoders(model: nn.Module) -> dict[str, Any]:
    """Path in `model` -> each text encoder ComfyUI runs through SDClipModel ("clip_l", "t5xxl")."""
    return {n: m for n, m in model.named_modules() if isinstance(m, comfy.sd1_clip.SDClipModel)}


def spec_of(transformer: Any) -> ClipSpec | str:
    """The spec of a CLIP text model, or why it is none, in half a sentence."""
    own = comfy.clip_model.CLIPTextModel
    inner: Any = getattr(transformer, "text_model", None)
    if (
        type(transformer).forward is not own.forward
        or type(inner) is not comfy.clip_model.CLIPTextModel_
    ):
        return f"a {type(transformer).__name__}, which Octavo does not accelerate yet"
    layers = inner.encoder.layers
    first = layers[0]
    kind = _activation(first.mlp.activation)
    if kind is None:
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


def _activation(function: Any) -> Literal["quick_gelu", "gelu"] | None:
    known = comfy.clip_model.ACTIVATIONS
    if function is known["quick_gelu"]:
        return "quick_gelu"
    return "gelu" if function is known["gelu"] else None


def _projects(name: str, encoder: Any, names: set[str]) -> bool:
    """Whether this encoder's projected pooled vector is used, so that its projection counts.

    SDXL takes it from G alone, and its checkpoints hold none for L: ComfyUI leaves that one
    uninitialised, and what is different at each start must not enter a key.
    """
    if not encoder.options_default[2]:
        return False
    return not (name == "clip_l" and "clip_g" in names and "t5xxl" not in names)


# One encoder


class Source:
    """The live weights of one sub-encoder, as AcceleratedEncoder wants its host.

    Holds no strong reference to the module: ComfyUI frees a model when its last user lets go.
    """

    def __init__(
        self,
        name: str,
        transformer: nn.Module,
        spec: ClipSpec,
        projects: bool,
        device: torch.device,
    ) -> None:
        self.name, self.spec, self.device = name, spec, device
        self.prefix = f"{name}.transformer."
        self.shapes = spec.tensors()
        self._transformer = weakref.ref(transformer)
        self._patcher: Callable[[], Any] = lambda: None
        self.projection_shape: tuple[int, int] | None = None
        if projects:
            try:
                weight = self.read(PROJECTION)
            except OctavoError:
                return
            if bool(torch.isfinite(weight.float()).all()):  # a file without one leaves garbage
                self.projection_shape = (weight.shape[0], weight.shape[1])

    def look_through(self, patcher: Any) -> None:
        """Read from now on what lies under the patches of `patcher`."""
        self._patcher = weakref.ref(patcher)

    def read(self, name: str) -> Tensor:
        """The unpatched weight: from ComfyUI's backup where a patch lies over it, dequantized."""
        transformer, patcher = self._transformer(), self._patcher()
        if transformer is None:
            raise OctavoError(f"{self.name}: ComfyUI freed this text encoder; load it again.")
        weight, _, convert = comfy.model_patcher.get_key_weight(transformer, name)
        kept = None if patcher is None else patcher.backup.get(self.prefix + name)
        if kept is not None:
            weight = kept.weight
        if convert is not None:
            weight = convert(weight)
        weight = weight.detach() if isinstance(weight, Tensor) else weight
        shape = self.shapes.get(name)
        if (
            type(weight) not in (Tensor, nn.Parameter)
            or weight.dtype not in _READABLE
            or weight.is_meta
            or (shape is not None and tuple(weight.shape) != shape)
        ):
            raise OctavoError(
                f"{self.name}: {name} is held in a form that Octavo cannot read "
                f"({type(weight).__name__}, {getattr(weight, 'dtype', 'no dtype')}); "
                "load the encoder with one of ComfyUI's own loaders."
            )
        return weight

    def encode(self, embeds: Tensor, mask: Tensor | None) -> Any:
        raise NotImplementedError("ComfyUI's own forward is called by the seam")


class Served:
    """One sub-encoder with its engine, its state and the reason whenever PyTorch answers."""

    def __init__(
        self, source: Source, accelerated: AcceleratedEncoder, transformer: nn.Module
    ) -> None:
        self.source, self.accelerated = source, accelerated
        self.parts = [weakref.ref(m) for m in transformer.modules() if m is not transformer]
        self.why_host = ""  # why the last call was answered by PyTorch; "" if an engine did
        self.broken = ""  # a fault that keeps PyTorch in service
        self.prepared = False
        self._digests: OrderedDict[uuid.UUID, str | None] = OrderedDict()

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
        if key not in self._digests:
            relevant = _relevant(self.source, patcher)
            self._digests[key] = _digest(relevant) if relevant else None
            while len(self._digests) > KEPT_DIGESTS:
                self._digests.popitem(last=False)
        identity = self._digests[key]
        return (
            None if identity is None else Patched(identity, _PatchedWeights(self.source, patcher))
        )


def _relevant(source: Source, patcher: Any) -> dict[str, list[Any]]:
    """Canonical name -> the patches of `patcher` that an engine's weights depend on."""
    found: dict[str, list[Any]] = {}
    for key, patches in patcher.patches.items():
        name = key.removeprefix(source.prefix)
        # Embeddings come from ComfyUI with their patches in them, so the table is left out.
        if name in (key, TOKENS) or name not in source.shapes:
            continue
        active = [p for p in patches if not (p[0] == 0 and p[2] == 1)]
        if active:
            found[name] = active
    return found


class _PatchedWeights:
    """`read` with LoRA and merges applied in FP32 by ComfyUI's own code; each is made once."""

    def __init__(self, source: Source, patcher: Any) -> None:
        self._source, self._patcher = source, patcher
        self._patches: dict[str, list[Any]] | None = None
        self._made: dict[str, Tensor] = {}

    def __call__(self, name: str) -> Tensor:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Tensor:
        base, device = self._source.read(name), self._source.device
        if self._patches is None:
            self._patches = _relevant(self._source, self._patcher)
        if name not in self._patches:
            return base if name == TOKENS else base.to(device)
        weight = base.to(device=device, dtype=torch.float32, copy=True)
        key = self._source.prefix + name
        weight = cast(Tensor, comfy.lora.calculate_weight(self._patches[name], weight, key))
        # Held in 16 bit where ComfyUI itself would hold it so: two passes read each weight.
        return weight.to(base.dtype) if base.dtype.itemsize == 2 else weight


def _digest(patches: Mapping[str, list[Any]]) -> str:
    """A digest of what the patches do: their tensors' bytes, strengths and kinds."""

    def one(name: str) -> bytes:
        digest = hashlib.sha256(name.encode())
        _feed(digest, patches[name])
        return digest.digest()

    # hashlib lets go of the interpreter's lock: a LoRA of 100 MB takes some 20 ms.
    with ThreadPoolExecutor(8) as threads:
        parts = list(threads.map(one, sorted(patches)))
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        digest.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    elif value is None or isinstance(value, str | int | float | bool | bytes):
        digest.update(repr(value).encode() + b";")
    elif isinstance(value, list | tuple | set):
        items = sorted(value, key=repr) if isinstance(value, set) else value
        digest.update(f"{type(value).__name__}{len(value)}(".encode())
        for item in items:
            _feed(digest, item)
    elif isinstance(value, dict):
        _feed(digest, sorted(value.items(), key=lambda item: repr(item[0])))
    elif isinstance(value, comfy.weight_adapter.WeightAdapterBase):
        digest.update(type(value).__qualname__.encode())
        _feed(digest, value.weights)
    elif callable(value) and hasattr(value, "__qualname__") and "<" not in value.__qualname__:
        digest.update(f"{value.__module__}.{value.__qualname__}".encode())
    else:  # unknown: equal to nothing else, so never served from another set
        digest.update(uuid.uuid4().bytes)


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


def _foreign(transformer: nn.Module, patcher: Any, served: Served) -> str:
    """What changes this encoder other than through `patcher.patches`; "" if nothing does."""
    if patcher.current_hooks is not None or patcher.forced_hooks is not None or patcher.hook_backup:
        return "hooks are active on this CLIP"
    others = [key for key, injections in patcher.injections.items() if key != KEY and injections]
    if others:
        return f"other patches are injected into this CLIP ({', '.join(map(str, others))})"
    for kind in (patcher.object_patches, patcher.weight_wrapper_patches):
        for key in kind:
            if key.startswith(served.source.prefix):
                return f"another node patches {key}"
    for part in served.parts:
        module = part()
        if module is not None and _is_changed(module):
            return f"another node replaced the forward of a {type(module).__name__}"
    if transformer._forward_pre_hooks:
        return "another node hooks into the encoder"
    return ""


def _is_changed(module: nn.Module) -> bool:
    if module._forward_hooks or module._forward_pre_hooks:
        return True
    forward = module.__dict__.get("forward")
    # A bypass LoRA that has left puts the class's own method back, onto the instance.
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def _is_loaded(patcher: Any) -> bool:
    """Whether `patcher` is the one of its clones whose state its module has now.

    A clone takes its original's `is_injected` along and may inject at the wrong time (a LoRA node
    running again while another branch is loaded); ComfyUI's own list knows better.
    """
    for loaded in management.current_loaded_models:
        other = loaded.model
        if other is not None and other.model is patcher.model:
            return other is patcher
    return False


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
                name, encoder.transformer, spec, _projects(name, encoder, set(found)), self.device
            )
            accelerated = AcceleratedEncoder(
                source,
                recipe=settings.recipe,
                engine=settings.engine,
                floor=settings.floors(),
                cache=cache(),
                background=settings.background,
                report=self._progress(),
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
        call = parse(args, kwargs, served.source.spec)
        served.why_host = (
            served.broken
            or ("the call is not one that Octavo knows" if call is None else "")
            or ("" if _is_loaded(patcher) else "another clone of this CLIP is loaded")
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
                result = served.accelerated.attempt(call.embeds, call.mask, patched)
                self._count(served, call.embeds.shape, patched)
                if result is None:
                    served.why_host = self._why_host(served, patched)
                    return None
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

    def _progress(self) -> Report:
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
            patcher.set_model_patch(_Models(self.companion), KEY)
        patcher.add_callback_with_key(
            CallbacksMP.ON_CLONE, KEY, lambda _, clone: self.keep_off(clone)
        )
        self.keep_off(patcher)

    def inject(self, patcher: Any) -> None:
        model = self.model()
        if model is None or patcher.model is not model:
            return  # a clone over another module (SelectCLIPDevice): that one stays PyTorch
        for name, served in self.served.items():
            transformer = cast(Any, model.get_submodule(name)).transformer
            there = transformer.__dict__.get("forward")
            if there is None or isinstance(there, Seam):
                transformer.__dict__["forward"] = Seam(self, served, transformer, patcher)
            else:
                served.why_host = "another node replaced the encoder's forward"

    def eject(self, patcher: Any) -> None:
        for name in self.served:
            # Whoever injected it: without it PyTorch answers, which is never wrong.
            with suppress(AttributeError):
                transformer = patcher.model.get_submodule(name).transformer
                if isinstance(transformer.__dict__.get("forward"), Seam):
                    del transformer.__dict__["forward"]

    def keep_off(self, patcher: Any) -> None:
        """Load no more of `patcher` than is needed while engines serve all of it.

        ComfyUI prepares all weights anew before every encode, which takes longer than the encode.
        """
        if "partially_load" in patcher.__dict__ or not hasattr(patcher, "partially_load"):
            return
        ours = weakref.ref(patcher)

        def partially_load(device_to: Any, *args: Any, **kwargs: Any) -> Any:
            patcher: Any = ours()
            forced = kwargs.get("force_patch_weights") or (len(args) > 1 and args[1])
            if forced or not self.serves_all(patcher):
                return type(patcher).partially_load(patcher, device_to, *args, **kwargs)
            if _is_prepared(patcher, device_to):
                with patcher.use_ejected(skip_and_inject_on_exit_only=True):
                    patcher.unpatch_model(patcher.offload_device, unpatch_weights=False)
                    patcher.patch_model(load_weights=False)
                return 0
            if patcher.is_dynamic() or management.is_device_cpu(device_to):
                return type(patcher).partially_load(patcher, device_to, *args, **kwargs)
            return _load_embeddings_only(patcher, device_to)

        patcher.partially_load = partially_load

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
        saved = _half_bytes(served.source.spec) - report.vram_bytes
        parts.append(f"{report.vram_bytes / 1e6:.0f} MB of VRAM ({saved / 1e6:.0f} MB saved)")
    return ", ".join(parts)


@remember
def _half_bytes(spec: ClipSpec) -> int:
    """What PyTorch keeps for it in 16 bit, without the token table that stays in use."""
    sizes = (torch.Size(shape).numel() for name, shape in spec.tensors().items() if name != TOKENS)
    return 2 * sum(sizes)


def _is_prepared(patcher: Any, device: Any) -> bool:
    """Whether the module is as an earlier load for the same patches left it."""
    model = patcher.model
    if model.current_weight_patches_uuid != patcher.patches_uuid or model.device != device:
        return False
    # What was unloaded since has 0 here: dynamic loading keeps the small weights in, the embeddings
    # are what `_load_embeddings_only` keeps.
    return bool(model.model_loaded_weight_memory > 0) and (
        patcher.is_dynamic() or bool(model.model_lowvram)
    )


def _load_embeddings_only(patcher: Any, device: Any) -> Any:
    """ModelPatcher.partially_load with no room for weights; then the embeddings alone.

    Dynamic loading keeps what is not run off the GPU by itself. The older ModelPatcher loads all of
    it; told that there is no room, it leaves the weights in RAM, still right where PyTorch is asked
    after all. The embeddings, which ComfyUI looks up at each prompt, move to the GPU.
    """
    model = patcher.model
    if not model.model_lowvram and model.model_loaded_weight_memory > 0:
        patcher.unpatch_model(patcher.offload_device, unpatch_weights=True)
    # Pinning would register gigabytes that nobody asks for.
    patcher.pin_weight_to_device = lambda key: None
    try:
        type(patcher).partially_load(patcher, device, 0.1)
    finally:
        del patcher.pin_weight_to_device
    moved = 0
    for encoder in sub_encoders(model).values():
        transformer = encoder.transformer
        for module in (
            transformer.text_model.embeddings.token_embedding,
            transformer.text_model.final_layer_norm,
            transformer.text_projection,
        ):
            module.to(device)
            moved += sum(int(p.nbytes) for p in module.parameters())
    model.model_loaded_weight_memory = max(model.model_loaded_weight_memory, moved)
    return moved


# Memory


class _EngineModel(nn.Module):
    """What ComfyUI's lists show for the engines: it has no weights of its own."""


class Companion(comfy.model_patcher.ModelPatcher):  # type: ignore[misc, unused-ignore]
    """The engines as a model that ComfyUI counts, loads with the CLIP and frees under pressure."""

    def __init__(self, service: Service) -> None:
        self._service = weakref.ref(service)
        offload = management.text_encoder_offload_device()
        super().__init__(_EngineModel(), load_device=service.device, offload_device=offload, size=1)

    def _served(self) -> list[Served]:
        service = self._service()
        return [] if service is None else list(service.served.values())

    def model_size(self) -> int:
        """Bytes: as measured, or an estimate (FP8 weights) before the engines are there."""
        estimates = (_half_bytes(s.source.spec) // 2 for s in self._served() if not s.broken)
        return max(1, sum(estimates), self.loaded_size())

    def loaded_size(self) -> int:
        service = self._service()
        return 0 if service is None else service.vram_bytes

    def current_loaded_device(self) -> Any:
        return self.load_device if self.loaded_size() else self.offload_device

    def partially_load(
        self, device_to: Any, extra_memory: float = 0, force_patch_weights: bool = False
    ) -> int:
        before = self.loaded_size()
        for served in self._served():
            if served.prepared and not served.broken:
                with torch.inference_mode(False), torch.no_grad():
                    if served.accelerated.resume():
                        self._changed()
        self.model.device = device_to
        return self.loaded_size() - before

    def _changed(self) -> None:
        service = self._service()
        if service is not None:
            service.memory_changed()

    def partially_unload(
        self, device_to: Any, memory_to_free: float = 0, force_patch_weights: bool = False
    ) -> int:
        """Whole engines go, the largest first, until enough is free."""
        freed = 0
        for served in sorted(self._served(), key=lambda s: -s.accelerated.vram_bytes):
            if freed >= memory_to_free:
                break
            freed += served.accelerated.rest()
        self._changed()
        return freed

    def detach(self, unpatch_all: bool = True) -> Any:
        # ComfyUI detaches with False before every load, to load again at once.
        if unpatch_all:
            self.partially_unload(self.offload_device, 1e32)
            self.model.device = self.offload_device
        return self.model

    def clone(self, *args: Any, **kwargs: Any) -> Companion:
        return self  # one engine, however many clones of the CLIP


class _Models:
    """How a patcher names models that are loaded with it (ModelPatcher.model_patches_models)."""

    def __init__(self, companion: Companion) -> None:
        self._companion = companion

    def models(self) -> list[Companion]:
        return [self._companion]


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
    service = service_for(clone.patcher, settings)
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


def send_text(text: str, node: str) -> None:
    """Show `text` on a node of the page; without a server nothing happens."""
    try:
        from server import PromptServer

        PromptServer.instance.send_progress_text(text, node)
    except (ImportError, AttributeError):  # used as a library, or an older ComfyUI
        log.debug("%s", text)


def save(clip: Any, name: str) -> list[Path]:
    """Write the FP8 checkpoint of each accelerated encoder of `clip`, patches included.

    They go into the first text_encoders folder, under `name` and never over an existing file.
    Raises OctavoError in one sentence.
    """
    import folder_paths

    from ..accelerated import fingerprint_of
    from ..compile import copy_file, make_checkpoint

    service = service_of(clip)
    if service is None or not service.served:
        raise OctavoError(
            "this CLIP is not served by Octavo; connect it through 'FP8 Text Encoder' first."
        )
    folder = Path(folder_paths.get_folder_paths("text_encoders")[0])
    written = []
    for served in service.served.values():
        source = served.source
        source.look_through(clip.patcher)
        with torch.inference_mode(False), torch.no_grad():
            patched = served.patched(clip.patcher)
            weights: Any = source if patched is None else _As(source, patched.read)
            entry, _ = make_checkpoint(
                weights,
                fingerprint_of(weights, service._progress()),
                load_recipe(service.settings.recipe),
                cache(),
                service._progress(),
                device=source.device,
            )
        target = _free_name(folder, name, served.name)
        copy_file(entry.path, target)
        written.append(target)
    return written


class _As:
    """A source under other weights."""

    def __init__(self, source: Source, read: Callable[[str], Tensor]) -> None:
        self.name, self.spec, self.device = source.name, source.spec, source.device
        self.projection_shape, self.read = source.projection_shape, read


def _free_name(folder: Path, name: str, encoder: str) -> Path:
    stem = "".join(c if c.isalnum() or c in "-_. " else "_" for c in name).strip(" .") or "octavo"
    for count in range(1, 10_000):
        number = f"_{count:02d}" if count > 1 else ""
        path = folder / f"{stem[:80]}_{encoder}_fp8{number}.safetensors"
        if not path.exists():
            return path
    raise FileError(folder, f"holds too many files called {stem}", "choose another name")


# Side by side


@dataclass(frozen=True)
class Compared:
    """One prompt through both: cosines of `tokens`, their mean and minimum, of pooled; medians."""

    prompt: str
    tokens: tuple[float, ...]
    pooled: float | None
    pytorch_ms: float
    octavo_ms: float

    @property
    def token_mean(self) -> float:
        return sum(self.tokens) / len(self.tokens)

    @property
    def token_min(self) -> float:
        return min(self.tokens)


@dataclass(frozen=True)
class Comparison:
    rows: tuple[Compared, ...]
    notes: tuple[str, ...]

    def text(self) -> str:
        """The tables as plain text."""
        lines = [
            *self.notes,
            "",
            "token mean  token min  pooled   PyTorch    Octavo  faster  prompt",
        ]
        for row in self.rows:
            pooled = "-" if row.pooled is None else f"{row.pooled:.4f}"
            faster = row.pytorch_ms / row.octavo_ms if row.octavo_ms else float("nan")
            lines.append(
                f"{row.token_mean:10.5f} {row.token_min:10.5f} {pooled:>7} "
                f"{row.pytorch_ms:7.2f} ms {row.octavo_ms:6.2f} ms {faster:6.1f}x  {row.prompt}"
            )
        return "\n".join(lines)


def compare(clip: Any, prompts: list[str], repeats: int) -> Comparison:
    """Each prompt through ComfyUI's PyTorch and through `clip`; raises OctavoError without ours."""
    service = service_of(clip)
    if service is None:
        raise OctavoError(
            "this CLIP is not served by Octavo; connect it through 'FP8 Text Encoder' first."
        )
    plain = _encode_all(without(clip), prompts, repeats)
    ours = _encode_all(clip, prompts, repeats)
    rows = []
    for prompt, (expected, expected_pooled, slow), (got, pooled, fast) in zip(
        prompts, plain, ours, strict=True
    ):
        cosines = _cosines(expected.flatten(0, -2), got.flatten(0, -2))
        same = None
        if pooled is not None and expected_pooled is not None:
            same = _cosines(expected_pooled, pooled)[0]
        rows.append(Compared(prompt, tuple(cosines), same, slow, fast))
    slow, fast = (sum(getattr(r, name) for r in rows) for name in ("pytorch_ms", "octavo_ms"))
    service.speed_up = slow / fast if fast else None
    service.show()
    notes = [served.report().text() for served in service.served.values()]
    notes += [
        f"{s.name}: answered by PyTorch: {s.why_host}"
        for s in service.served.values()
        if s.why_host
    ]
    notes += [f"{name}: PyTorch; it is {what}" for name, what in service.unknown.items()]
    return Comparison(tuple(rows), tuple(notes))


def _encode_all(
    clip: Any, prompts: list[str], repeats: int
) -> list[tuple[Tensor, Tensor | None, float]]:
    """(conditioning, pooled, median milliseconds) of each prompt, after one encode to warm up."""
    results = []
    for prompt in prompts:
        tokens = clip.tokenize(prompt)
        clip.encode_from_tokens(tokens, return_pooled=True)
        times = []
        for _ in range(repeats):
            management.throw_exception_if_processing_interrupted()
            _wait(clip.patcher.load_device)
            start = time.perf_counter()
            cond, pooled = clip.encode_from_tokens(tokens, return_pooled=True)
            _wait(clip.patcher.load_device)
            times.append((time.perf_counter() - start) * 1e3)
        results.append((cond, pooled, sorted(times)[len(times) // 2]))
    return results


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cosines(a: Tensor, b: Tensor) -> list[float]:
    """Cosines of rows; two zero rows are equal (padding, zeroed states)."""
    a, b = a.double().cpu(), b.double().cpu()
    cosine = torch.nn.functional.cosine_similarity(a, b, dim=-1)
    both_zero = (a.abs().sum(-1) == 0) & (b.abs().sum(-1) == 0)
    return [float(c) for c in torch.where(both_zero, 1.0, cosine)]


def environment(verify: bool = False) -> str:
    """What `octavo doctor` shows, for this process, with ComfyUI's cache folder."""
    from ..doctor import examine, text

    store, found = cache(), examine()
    entries = store.entries()
    found["cache"] = {
        "root": str(store.root),
        "entries": len(entries),
        "bytes": sum(entry.manifest.length for entry in entries),
        "budget_bytes": store.budget_bytes,
        "writable": found["cache"].get("writable", True),
    }
    lines = [text(found)]
    for entry in entries:
        lines.append(
            f"  {entry.manifest.kind:10} {entry.manifest.key}  {entry.manifest.length / 1e6:.1f} MB"
        )
    if verify:
        faults = [c for c in store.verify_all() if c.fault]
        lines.append(f"  checked: {len(entries)} entries, {len(faults)} faults")
        lines += [f"  {c.kind} {c.key}: {c.fault}" for c in faults]
    return "\n".join(lines)
