# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's memory: the engines as a model of its own, PyTorch's weights off the GPU meanwhile."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import comfy.model_management as management
import comfy.model_patcher
import torch
from torch import nn

from .. import staging
from .comfy_source import sub_encoders
from .comfy_specs import half_bytes, spec_of, still_read

if TYPE_CHECKING:
    from .comfy import Served, Service


def is_prepared(patcher: Any, device: Any) -> bool:
    """Whether the module is as an earlier load left it, for these patches or for others."""
    model = patcher.model
    if model.current_weight_patches_uuid is None or model.device != device:
        return False
    # What was unloaded since has 0 here: dynamic loading keeps the small weights in, the embeddings
    # are what `load_embeddings_only` keeps.
    return bool(model.model_loaded_weight_memory > 0) and (
        patcher.is_dynamic() or bool(model.model_lowvram)
    )


def loaded_patcher(model: nn.Module) -> Any | None:
    """The one of the patchers over `model` that is loaded: its state is what the module has now.

    A clone takes its original's `is_injected` along and may inject at the wrong time (a LoRA node
    running again while another branch is loaded); ComfyUI's own list knows better.
    """
    for loaded in management.current_loaded_models:
        patcher = loaded.model
        if patcher is not None and patcher.model is model:
            return patcher
    return None


def is_ram(device: Any) -> bool:
    """Whether weights on `device` are where they come from, so that nothing is to be kept off."""
    return bool(management.is_device_cpu(device))


def load_for_pytorch(patcher: Any) -> None:
    """Put the patches of `patcher` under PyTorch, if they are not there."""
    if patcher.model.current_weight_patches_uuid == patcher.patches_uuid:
        return
    if patcher.is_dynamic() or is_ram(patcher.load_device):
        type(patcher).partially_load(patcher, patcher.load_device)
    else:
        load_embeddings_only(patcher, patcher.load_device)


def load_embeddings_only(patcher: Any, device: Any) -> Any:
    """ModelPatcher.partially_load with no room for weights; then the embeddings alone.

    Dynamic loading keeps what is not run off the GPU by itself. The older ModelPatcher loads all of
    it; told that there is no room, it leaves the weights in RAM, still right where PyTorch is asked
    after all. The embeddings, which ComfyUI looks up at each prompt, move to the GPU.
    """
    model = patcher.model
    if model.current_weight_patches_uuid is not None:
        patcher.unpatch_model(patcher.offload_device, unpatch_weights=True)
    # A full load leaves marks that unpatching does not take away, and a load with no room takes a
    # marked module for one that has the patches of `patcher` already: they would be dropped.
    for module in model.modules():
        comfy.model_patcher.wipe_lowvram_weight(module)
    # Pinning would register gigabytes that nobody asks for.
    patcher.pin_weight_to_device = lambda key: None
    try:
        type(patcher).partially_load(patcher, device, 0.1)
    finally:
        del patcher.pin_weight_to_device
    moved = 0
    for encoder in sub_encoders(model).values():
        if isinstance(spec_of(encoder.transformer), str):
            continue  # no engine's: it stays as that load left it
        for module in still_read(encoder.transformer):
            module.to(device)
            moved += sum(int(p.nbytes) for p in module.parameters())
    model.model_loaded_weight_memory = max(model.model_loaded_weight_memory, moved)
    return moved


def _pinned(size: int) -> torch.Tensor | None:
    """Page-locked memory that ComfyUI counts, or None where it allows none."""
    buffer = torch.empty(size, dtype=torch.uint8)
    return buffer if management.pin_memory(buffer) else None


if hasattr(management, "pin_memory"):
    staging.allocate = _pinned


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
        wanted = (s for s in self._served() if s.has_engine or not (s.prepared or s.broken))
        return max(1, sum(half_bytes(s.source.spec) // 2 for s in wanted), self.loaded_size())

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
        """Patched sets go, then whole engines, the largest first, until enough is free."""
        freed = sum(served.accelerated.drop_sets() for served in self._served())
        if freed:
            management.soft_empty_cache()
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Companion:
        return self


class Models:
    """How a patcher names models that are loaded with it (ModelPatcher.model_patches_models)."""

    def __init__(self, companion: Companion) -> None:
        self._companion = companion

    def models(self) -> list[Companion]:
        return [self._companion]
