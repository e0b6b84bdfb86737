# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Small CLIPs of every family in ComfyUI's own wrappers, seeded. Runs inside ComfyUI."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import comfy.sd
import comfy.sdxl_clip
import comfy.text_encoders.flux
import comfy.text_encoders.sd2_clip
import comfy.text_encoders.sd3_clip
import torch
from comfy import sd1_clip

WIDTHS = {"clip_l": 128, "clip_h": 192, "clip_g": 192}
_SMALL = {
    "clip_l_model_config": {
        "hidden_size": 128,
        "num_attention_heads": 2,
        "intermediate_size": 512,
        "num_hidden_layers": 12,
    },
    "clip_h_model_config": {
        "hidden_size": 192,
        "num_attention_heads": 3,
        "intermediate_size": 512,
        "num_hidden_layers": 24,
    },
    "clip_g_model_config": {
        "hidden_size": 192,
        "num_attention_heads": 3,
        "intermediate_size": 512,
        "num_hidden_layers": 32,
    },
    "t5xxl_model_config": {
        "d_model": 64,
        "num_heads": 4,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
    },
}


def _families() -> dict[str, tuple[Any, Any]]:
    sdxl, sd3, flux = comfy.sdxl_clip, comfy.text_encoders.sd3_clip, comfy.text_encoders.flux
    sd2 = comfy.text_encoders.sd2_clip
    return {
        "sd1": (sd1_clip.SD1ClipModel, sd1_clip.SD1Tokenizer),
        "sd2": (sd2.SD2ClipModel, sd2.SD2Tokenizer),
        "sdxl": (sdxl.SDXLClipModel, sdxl.SDXLTokenizer),
        "refiner": (sdxl.SDXLRefinerClipModel, sdxl.SDXLTokenizer),
        "cascade": (sdxl.StableCascadeClipModel, sdxl.StableCascadeTokenizer),
        "sd3": (sd3.sd3_clip(dtype_t5=torch.float16), sd3.SD3Tokenizer),
        "sd3_no_t5": (sd3.sd3_clip(t5=False), sd3.SD3Tokenizer),
        "flux": (flux.flux_clip(dtype_t5=torch.float32), flux.FluxTokenizer),
    }


def seeded(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """One weight: CLIP-like scales, so that FP8 serves it well."""
    generator = torch.Generator().manual_seed(hash_of(f"{seed}:{name}"))
    values = torch.randn(shape, generator=generator)
    if "norm" in name and name.endswith("weight"):
        return 1 + 0.1 * values
    if "embedding" in name:
        return values * 0.3
    if len(shape) < 2:
        return values * 0.02
    # What goes back into the residual stream is small, as in a trained encoder.
    return values * shape[-1] ** -0.5 * (0.4 if "out_proj" in name or "fc2" in name else 1.0)


def hash_of(text: str) -> int:
    value = 0
    for character in text:
        value = (value * 131 + ord(character)) % 2**31
    return value


def tiny_clip(family: str, seed: int = 0, embeddings: str | None = None) -> Any:
    """A `comfy.sd.CLIP` of `family`; equal arguments give equal weights."""
    wrapper, tokenizer = _families()[family]
    target = SimpleNamespace(params={}, clip=wrapper, tokenizer=tokenizer)
    options = {**{k: dict(v) for k, v in _SMALL.items()}, "dtype": torch.float16}
    if family == "sd3":  # its wrapper pads CLIP to T5's true width
        options["t5xxl_model_config"]["d_model"] = 4096
    clip = comfy.sd.CLIP(target, embedding_directory=embeddings, model_options=options)
    model = clip.cond_stage_model
    state = {n: seeded(n, t.shape, seed).to(t.dtype) for n, t in model.state_dict().items()}
    model.load_state_dict(state, assign=clip.patcher.is_dynamic())
    for name, width in WIDTHS.items():
        if hasattr(clip.tokenizer, name):
            getattr(clip.tokenizer, name).embedding_size = width
    clip.patcher.cached_patcher_init = (_patcher_of, (family, seed, embeddings))
    return clip


def _patcher_of(
    family: str, seed: int, embeddings: str | None, disable_dynamic: bool = False
) -> Any:
    return tiny_clip(family, seed, embeddings).patcher


def tiny_lora(clip: Any, seed: int, rank: int = 4, scale: float = 0.3) -> dict[str, torch.Tensor]:
    """A LoRA file over every attention and MLP matrix of the CLIP text models of `clip`."""
    lora: dict[str, torch.Tensor] = {}
    for key, weight in clip.cond_stage_model.state_dict().items():
        if ".encoder.layers." not in key or not key.endswith("weight") or weight.dim() != 2:
            continue
        name = f"text_encoders.{key.removesuffix('.weight')}"
        out, inner = weight.shape
        generator = torch.Generator().manual_seed(hash_of(f"lora{seed}:{key}"))
        lora[f"{name}.lora_up.weight"] = torch.randn(out, rank, generator=generator) * rank**-0.5
        down = torch.randn(rank, inner, generator=generator) * inner**-0.5 * scale
        lora[f"{name}.lora_down.weight"] = down
        lora[f"{name}.alpha"] = torch.tensor(float(rank))
    return lora
