# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Small CLIPs of every family in ComfyUI's own wrappers, seeded. Runs inside ComfyUI."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import comfy.sd
import comfy.sdxl_clip
import comfy.text_encoders.aura_t5
import comfy.text_encoders.flux
import comfy.text_encoders.genmo
import comfy.text_encoders.hidream
import comfy.text_encoders.lt
import comfy.text_encoders.pixart_t5
import comfy.text_encoders.sd2_clip
import comfy.text_encoders.sd3_clip
import comfy.text_encoders.wan
import torch
from comfy import sd1_clip

WIDTHS = {"clip_l": 128, "clip_h": 192, "clip_g": 192, "t5xxl": 128}
_T5 = {"d_model": 128, "num_heads": 4, "d_kv": 32, "d_ff": 256, "num_layers": 3}
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
    "t5xxl_model_config": _T5,
    "umt5xxl_model_config": {**_T5, "vocab_size": 32128},  # T5's tokenizer stands in for its own
    "pile_t5xl_model_config": _T5,
}


class _WanTokenizer(sd1_clip.SD1Tokenizer):  # type: ignore[misc]
    """As WanT5Tokenizer, whose vocabulary comes with the weights."""

    def __init__(self, embedding_directory: str | None = None, tokenizer_data: Any = None) -> None:
        super().__init__(
            embedding_directory=embedding_directory,
            tokenizer_data=tokenizer_data or {},
            clip_name="umt5xxl",
            tokenizer=comfy.text_encoders.genmo.T5XXLTokenizer,
        )


class _HiDreamTokenizer(comfy.text_encoders.sd3_clip.SD3Tokenizer):  # type: ignore[misc]
    """As HiDreamTokenizer, without the language model's."""

    def __init__(self, embedding_directory: str | None = None, tokenizer_data: Any = None) -> None:
        super().__init__(embedding_directory, tokenizer_data or {})
        self.t5xxl = comfy.text_encoders.sd3_clip.T5XXLTokenizer(
            embedding_directory, tokenizer_data or {}, min_length=128, max_length=128
        )

    def tokenize_with_weights(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        tokens = super().tokenize_with_weights(*args, **kwargs)
        return {**tokens, "t5xxl": tokens["t5xxl"][:1], "llama": []}


def _families() -> dict[str, tuple[Any, Any]]:
    sdxl, sd3, flux = comfy.sdxl_clip, comfy.text_encoders.sd3_clip, comfy.text_encoders.flux
    sd2, t5 = comfy.text_encoders.sd2_clip, comfy.text_encoders
    return {
        "sd1": (sd1_clip.SD1ClipModel, sd1_clip.SD1Tokenizer),
        "sd2": (sd2.SD2ClipModel, sd2.SD2Tokenizer),
        "sdxl": (sdxl.SDXLClipModel, sdxl.SDXLTokenizer),
        "refiner": (sdxl.SDXLRefinerClipModel, sdxl.SDXLTokenizer),
        "cascade": (sdxl.StableCascadeClipModel, sdxl.StableCascadeTokenizer),
        "sd3": (sd3.sd3_clip(dtype_t5=torch.float16), sd3.SD3Tokenizer),
        "sd3_no_t5": (sd3.sd3_clip(t5=False), sd3.SD3Tokenizer),
        "flux": (flux.flux_clip(dtype_t5=torch.float32), flux.FluxTokenizer),
        "pixart": (t5.pixart_t5.pixart_te(), t5.pixart_t5.PixArtTokenizer),
        "mochi": (t5.genmo.mochi_te(), t5.genmo.MochiT5Tokenizer),
        "ltxv": (t5.lt.ltxv_te(), t5.lt.LTXVT5Tokenizer),
        "hidream": (
            t5.hidream.hidream_clip(clip_l=False, clip_g=False, llama=False),
            _HiDreamTokenizer,
        ),
        "wan": (t5.wan.te(), _WanTokenizer),
        "aura": (t5.aura_t5.AuraT5Model, t5.aura_t5.AuraT5Tokenizer),
        "sd1_fp8": (sd1_clip.SD1ClipModel, sd1_clip.SD1Tokenizer),
        "long": (sd1_clip.SD1ClipModel, sd1_clip.SD1Tokenizer),
        "long_sdxl": (sdxl.SDXLClipModel, sdxl.SDXLTokenizer),
    }


_BACK = ("out_proj.weight", "fc2.weight", "SelfAttention.o.weight", "DenseReluDense.wo.weight")


def seeded(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """One weight: CLIP-like scales, so that FP8 serves it well."""
    generator = torch.Generator().manual_seed(hash_of(f"{seed}:{name}"))
    values = torch.randn(shape, generator=generator)
    if "norm" in name and name.endswith("weight"):
        return 1 + 0.1 * values
    if "embedding" in name or name.endswith("shared.weight"):
        return values * 0.3
    if name.endswith("SelfAttention.q.weight"):  # T5 does not scale its products
        return values * shape[-1] ** -0.5 * 32**-0.5
    if len(shape) < 2:
        return values * 0.02
    # What goes back into the residual stream is small, as in a trained encoder.
    return values * shape[-1] ** -0.5 * (0.4 if name.endswith(_BACK) else 1.0)


def hash_of(text: str) -> int:
    value = 0
    for character in text:
        value = (value * 131 + ord(character)) % 2**31
    return value


def tiny_clip(family: str, seed: int = 0, embeddings: str | None = None) -> Any:
    """A `comfy.sd.CLIP` of `family`; equal arguments give equal weights."""
    wrapper, tokenizer = _families()[family]
    target = SimpleNamespace(params={}, clip=wrapper, tokenizer=tokenizer)
    dtype = torch.float8_e4m3fn if family.endswith("fp8") else torch.float16
    options = {**{k: dict(v) for k, v in _SMALL.items()}, "dtype": dtype}
    if family == "sd3":  # its wrapper pads CLIP to T5's true width
        options["t5xxl_model_config"]["d_model"] = 4096
    lengths = {}
    if family.startswith("long"):  # as comfy/text_encoders/long_clipl.py says it of a file
        options["clip_l_model_config"]["max_position_embeddings"] = 248
        lengths["clip_l_max_length"] = 248
    clip = comfy.sd.CLIP(
        target, embedding_directory=embeddings, tokenizer_data=lengths, model_options=options
    )
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
    """A LoRA file over every attention and MLP matrix of the text models of `clip`."""
    lora: dict[str, torch.Tensor] = {}
    for key, weight in clip.cond_stage_model.state_dict().items():
        inside = ".encoder.layers." in key or ".encoder.block." in key
        if not inside or "relative" in key or not key.endswith("weight") or weight.dim() != 2:
            continue
        name = f"text_encoders.{key.removesuffix('.weight')}"
        out, inner = weight.shape
        generator = torch.Generator().manual_seed(hash_of(f"lora{seed}:{key}"))
        lora[f"{name}.lora_up.weight"] = torch.randn(out, rank, generator=generator) * rank**-0.5
        down = torch.randn(rank, inner, generator=generator) * inner**-0.5 * scale
        lora[f"{name}.lora_down.weight"] = down
        lora[f"{name}.alpha"] = torch.tensor(float(rank))
    return lora


def load_files(paths: list[str], kind: str, embeddings: list[str], t5: dict[str, int]) -> Any:
    """What ComfyUI's loaders do with `paths`, but a T5 has the sizes `t5` and CLIP-L is small."""
    options = {"t5xxl_model_config": t5, "model_config": dict(_SMALL["clip_l_model_config"])}
    kinds = comfy.sd.CLIPType
    return comfy.sd.load_clip(
        paths, embeddings, clip_type=getattr(kinds, kind), model_options=options
    )
