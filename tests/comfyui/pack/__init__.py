# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Nodes for the tests alone: tiny CLIPs, LoRA, and conditioning written to files.

Loaded by ComfyUI as a custom node beside Octavo. `simulate` makes Octavo serve on the CPU with the
simulated FP8 engine, which no user can switch on: it replaces `hosts.comfy.facts`.
"""

from __future__ import annotations

import copy
import errno
import importlib
import json
import os
import sys
from types import ModuleType
from typing import Any

import comfy.sd
import folder_paths
import torch
from safetensors.torch import save_file

from . import families

# Octavo's own ranges and the simulated FP8 judge: the same path in seconds instead of minutes.
for heavy in ("modelopt", "onnxruntime"):
    sys.modules[heavy] = None  # type: ignore[assignment]


def octavo(name: str) -> ModuleType:
    """A module of the Octavo that this ComfyUI loaded as a node pack."""
    for found, module in list(sys.modules.items()):
        if os.sep in found and hasattr(module, "comfy_entrypoint") and "octavo" in found:
            return importlib.import_module(f"{found}.{name}")
    raise RuntimeError("Octavo is not loaded as a custom node here")


def simulate(on: bool) -> None:
    from_pack = {n: octavo(n) for n in ("hosts.comfy", "device", "choose", "trt")}
    missing = from_pack["trt"].Missing("not in this test", "nothing")
    packages = from_pack["choose"].Packages(missing, missing, True)
    fake = from_pack["device"].Device("cuda", 0, "simulated", 89)
    from_pack["hosts.comfy"].facts = lambda _: (fake, packages) if on else (None, None)


class _Node:
    CATEGORY = "octavo test"
    FUNCTION = "run"
    OUTPUT_NODE = False


class Clip(_Node):
    RETURN_TYPES = ("CLIP",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        required = {
            "family": ("STRING", {}),
            "seed": ("INT", {"default": 0}),
            "simulate": ("BOOLEAN", {"default": True}),
        }
        return {"required": required}

    def run(self, family: str, seed: int, simulate: bool) -> tuple[Any]:
        globals()["simulate"](simulate)
        folder = folder_paths.get_folder_paths("embeddings")[0]
        return (families.tiny_clip(family, seed, folder),)


class Files(_Node):
    """What CLIPLoader and DualCLIPLoader do, with a T5 that is narrower than its file's kind."""

    RETURN_TYPES = ("CLIP",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        required = {"names": ("STRING", {}), "form": ("STRING", {}), "t5": ("STRING", {})}
        return {"required": required}

    def run(self, names: str, form: str, t5: str) -> tuple[Any]:
        globals()["simulate"](True)
        paths = [
            folder_paths.get_full_path_or_raise("text_encoders", name) for name in names.split()
        ]
        embeddings = folder_paths.get_folder_paths("embeddings")
        return (families.load_files(paths, form, embeddings, json.loads(t5)),)


class Lora(_Node):
    """What LoraLoader does, without a diffusion model."""

    RETURN_TYPES = ("CLIP",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        required = {
            "clip": ("CLIP",),
            "seed": ("INT", {}),
            "strength": ("FLOAT", {"default": 1.0, "min": -10, "max": 10}),
            "bypass": ("BOOLEAN", {"default": False}),
        }
        return {"required": required}

    def run(self, clip: Any, seed: int, strength: float, bypass: bool) -> tuple[Any]:
        load = comfy.sd.load_bypass_lora_for_models if bypass else comfy.sd.load_lora_for_models
        return (load(None, clip, families.tiny_lora(clip, seed), 0.0, strength)[1],)


class LoraFile(_Node):
    RETURN_TYPES = ("STRING",)
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        return {"required": {"clip": ("CLIP",), "seed": ("INT", {}), "name": ("STRING", {})}}

    def run(self, clip: Any, seed: int, name: str) -> tuple[str]:
        lora = {k: v.contiguous() for k, v in families.tiny_lora(clip, seed).items()}
        save_file(lora, os.path.join(folder_paths.get_folder_paths("loras")[0], name))
        return (name,)


class Encode(_Node):
    """Encodings that no core node asks for: unprojected pooled, and third-party direct calls."""

    RETURN_TYPES = ("CONDITIONING",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        how = ["unprojected", "direct", "loaded", "inner", "unknown"]
        return {"required": {"clip": ("CLIP",), "text": ("STRING", {}), "how": (how,)}}

    def run(self, clip: Any, text: str, how: str) -> tuple[Any]:
        tokens = clip.tokenize(text)
        if how == "unprojected":
            return (clip.encode_from_tokens_scheduled(tokens, unprojected=True),)
        clip.load_model()
        if how in ("inner", "unknown"):  # around the seam, and through it by another way
            name = next(n for n in ("clip_g", "clip_l") if hasattr(clip.cond_stage_model, n))
            transformer = getattr(clip.cond_stage_model, name).transformer
            ids = torch.tensor([[t[0] for t in tokens[name[-1]][0]]])
            run = transformer.text_model if how == "inner" else transformer
            with torch.no_grad():
                cond = run(ids)[0]
            return ([[cond.float(), {}]],)
        if how == "direct":  # what weighting packs do
            name = next(
                n for n in ("clip_g", "clip_l", "clip_h") if hasattr(clip.cond_stage_model, n)
            )
            cond, pooled = getattr(clip.cond_stage_model, name).encode_token_weights(
                tokens[name[-1]]
            )
        else:
            cond, pooled = clip.encode_from_tokens(tokens, return_pooled=True)
        return ([[cond, {"pooled_output": pooled}]],)


class Keep(_Node):
    """Write conditioning to output/<name>.safetensors."""

    RETURN_TYPES = ()
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        return {"required": {"conditioning": ("CONDITIONING",), "name": ("STRING", {})}}

    def run(self, conditioning: Any, name: str) -> dict[str, Any]:
        tensors, facts = {}, []
        for i, (cond, extra) in enumerate(conditioning):
            tensors[f"{i}.cond"] = cond.clone().contiguous()
            for key, value in extra.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{i}.{key}"] = value.clone().contiguous()
            facts.append({k: v for k, v in extra.items() if isinstance(v, int | float | str)})
        folder = folder_paths.get_output_directory()
        save_file(
            tensors, os.path.join(folder, f"{name}.safetensors"), {"facts": json.dumps(facts)}
        )
        return {"ui": {"text": [name]}}


class Light(_Node):
    """Pass the CLIP on; keep PyTorch's weights off its device as on a GPU, or not any more."""

    RETURN_TYPES = ("CLIP",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        return {"required": {"clip": ("CLIP",), "on": ("BOOLEAN", {})}}

    def run(self, clip: Any, on: bool) -> tuple[Any]:
        memory = octavo("hosts.comfy_memory")
        memory.is_ram = (lambda _: False) if on else memory.management.is_device_cpu
        return (clip,)


class Change(_Node):
    """Put parts of another CLIP into an encoder, past what a patcher tells; or copy the CLIP."""

    RETURN_TYPES = ("CLIP",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        ways = ["object patch", "object patch above", "transformer", "layer", "copy"]
        return {"required": {"clip": ("CLIP",), "other": ("CLIP",), "what": (ways,)}}

    def run(self, clip: Any, other: Any, what: str) -> tuple[Any]:
        if what == "copy":
            return (copy.deepcopy(clip),)
        clip = clip.clone()
        mine, theirs = clip.cond_stage_model.clip_l, other.cond_stage_model.clip_l
        if what == "object patch":
            clip.patcher.add_object_patch("clip_l.transformer", theirs.transformer)
        elif what == "object patch above":
            clip.patcher.add_object_patch("clip_l", theirs)
        elif what == "transformer":
            mine.transformer = theirs.transformer
        else:
            layers = theirs.transformer.text_model.encoder.layers
            mine.transformer.text_model.encoder.layers[1] = layers[1]
        return (clip,)


class Disk(_Node):
    """Pass the CLIP on; from now on the cache has a full or read-only disk, or no sound size."""

    RETURN_TYPES = ("CLIP",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        modes = ["fine", "full", "read-only", "budget"]
        return {"required": {"clip": ("CLIP",), "mode": (modes,)}}

    def run(self, clip: Any, mode: str) -> tuple[Any]:
        atomic = octavo("engine_cache.atomic")
        for name, real in _ATOMIC.items():
            setattr(atomic, name, real)
        _ATOMIC.update({n: getattr(atomic, n) for n in ("new_partial", "flush")})

        def fails(code: int) -> Any:
            def fail(path: Any, *_: Any) -> None:
                raise OSError(code, os.strerror(code), str(path))

            return fail

        if mode == "full":  # which is noticed at the latest when a file is to be kept
            atomic.flush = fails(errno.ENOSPC)
        elif mode == "read-only":
            atomic.new_partial = fails(errno.EROFS)
        os.environ.pop("OCTAVO_CACHE_BUDGET", None)
        if mode == "budget":
            os.environ["OCTAVO_CACHE_BUDGET"] = "a lot"
        return (clip,)


_ATOMIC: dict[str, Any] = {}


class Press(_Node):
    """Ask the engines of a CLIP for one byte, as ComfyUI does under pressure, and for all."""

    RETURN_TYPES = ()
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        return {"required": {"clip": ("CLIP",), "after": ("CONDITIONING",)}}

    def run(self, clip: Any, after: Any) -> dict[str, Any]:
        service = octavo("hosts.comfy").service_of(clip)
        steps = []
        for wanted in (1, 1, 1e32):
            before = service.companion.loaded_size()
            freed = service.companion.partially_unload(None, wanted)
            encoders = [s.accelerated for s in service.served.values()]
            steps.append(
                {
                    "freed": freed,
                    "really": before - service.companion.loaded_size(),
                    "sets": sum(len(e._sets) for e in encoders),
                    "loaded": sum(e._serving is not None for e in encoders),
                }
            )
        return {"ui": {"text": [json.dumps(steps)]}}


class State(_Node):
    """How Octavo served the last calls of a CLIP, as JSON. `after` only orders the graph."""

    RETURN_TYPES = ()
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        required = {"clip": ("CLIP",), "after": ("CONDITIONING",)}
        return {"required": required}

    @classmethod
    def IS_CHANGED(cls, **_: Any) -> float:  # noqa: N802
        return float("nan")

    def run(self, clip: Any, after: Any) -> dict[str, Any]:
        service = octavo("hosts.comfy").service_of(clip)
        found: dict[str, Any] = {"lines": [], "served": {}, "details": {}}
        if service is not None:
            found["lines"] = service.lines()
            for name, served in service.served.items():
                report = served.report()
                found["served"][name] = {"engine": report.engine, "why_host": served.why_host}
                serving = served.accelerated._serving
                if serving is not None:
                    found["details"][name] = {
                        "recipe": serving.recipe.name,
                        "checkpoint": str(serving.checkpoint.path),
                        "body": served.accelerated._content.body,
                    }
            found["keys"] = len(clip.patcher.model.state_dict())
            found["bytes"] = service.vram_bytes
            model = clip.patcher.model
            found["pytorch_patched"] = (
                model.current_weight_patches_uuid == clip.patcher.patches_uuid
            )
        return {"ui": {"text": [json.dumps(found)]}}


NODE_CLASS_MAPPINGS = {
    "OctavoTestClip": Clip,
    "OctavoTestLora": Lora,
    "OctavoTestLoraFile": LoraFile,
    "OctavoTestEncode": Encode,
    "OctavoTestDisk": Disk,
    "OctavoTestFiles": Files,
    "OctavoTestKeep": Keep,
    "OctavoTestLight": Light,
    "OctavoTestChange": Change,
    "OctavoTestPress": Press,
    "OctavoTestState": State,
}
