# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""One set of seeded weights in every packaging that users have, and safetensors made by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from octavo.encoders.clip import PROJECTION, ClipSpec
from octavo.encoders.t5 import T5Spec
from octavo.seeded import seeded_tensors
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]

SMALL = ClipSpec(2, 128, 256, 2, 77, 1000, "gelu")
LARGER = ClipSpec(3, 192, 384, 3, 77, 900, "gelu")  # the G beside an L
# Heads times their size is not the width, as in the small v1.1 sizes: no slip hides.
SMALL_T5 = T5Spec(3, 64, 96, 4, 12, 200)
LONG = ClipSpec(2, 128, 256, 2, 248, 1000, "gelu")

_OPENAI = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "self_attn.out_proj": "attn.out_proj",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}


def canonical(
    spec: ClipSpec = SMALL,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float16,
    projection: bool = True,
) -> Tensors:
    tensors = dict(seeded_tensors(spec, seed=seed, dtype=dtype, projection=projection))
    if projection:
        tensors[PROJECTION] = tensors[PROJECTION][:64].contiguous()  # not square: no slip hides
    return tensors


def hugging_face(tensors: Tensors, prefix: str = "text_model.", projection: str = PROJECTION):
    """`projection`: its whole name; "" leaves it out, one without .weight is stored transposed."""
    named = {}
    for name, tensor in tensors.items():
        if name != PROJECTION:
            named[prefix + name.removeprefix("text_model.")] = tensor
        elif projection:
            whole = projection.endswith(".weight")
            named[projection] = tensor if whole else tensor.T.contiguous()
    return named


def openai(tensors: Tensors, prefix: str = "", projection: str = "text_projection"):
    """As `hugging_face`; `projection` is appended to the prefix."""
    named = {}
    for name, tensor in tensors.items():
        leaf = name.removeprefix("text_model.")
        if name == PROJECTION:
            if projection:
                whole = projection.endswith(".weight")
                named[prefix + projection] = tensor if whole else tensor.T.contiguous()
        elif leaf == "embeddings.token_embedding.weight":
            named[prefix + "token_embedding.weight"] = tensor
        elif leaf == "embeddings.position_embedding.weight":
            named[prefix + "positional_embedding"] = tensor
        elif leaf.startswith("final_layer_norm."):
            named[prefix + leaf.replace("final_layer_norm", "ln_final")] = tensor
        else:
            _, _, index, rest = leaf.split(".", 3)
            block = f"{prefix}transformer.resblocks.{index}."
            inner, kind = rest.rsplit(".", 1)
            if inner in _OPENAI:
                named[f"{block}{_OPENAI[inner]}.{kind}"] = tensor
            elif inner == "self_attn.q_proj":
                qkv = [name.replace("q_proj", f"{x}_proj") for x in "qkv"]
                named[f"{block}attn.in_proj_{kind}"] = torch.cat([tensors[n] for n in qkv])
    return named


def image_tower(prefix: str = "vision_model.") -> Tensors:
    """The start of Hugging Face's image tower, whose blocks are named like the text tower's."""
    names = [f"encoder.layers.0.self_attn.{x}_proj" for x in ("q", "k", "v", "out")]
    named = {
        f"{prefix}{n}.weight": torch.ones(64, 64) for n in (*names, "encoder.layers.0.mlp.fc1")
    }
    return named | {
        prefix + "embeddings.patch_embedding.weight": torch.ones(64, 3, 16, 16),
        prefix + "embeddings.position_embedding.weight": torch.ones(5, 64),
    }


def openai_image_tower(prefix: str = "visual.") -> Tensors:
    block = prefix + "transformer.resblocks.0."
    return {
        prefix + "conv1.weight": torch.ones(64, 3, 16, 16),
        prefix + "class_embedding": torch.ones(64),
        prefix + "positional_embedding": torch.ones(5, 64),
        block + "attn.in_proj_weight": torch.ones(192, 64),
        block + "attn.out_proj.weight": torch.ones(64, 64),
    }


def unet() -> Tensors:
    return {"model.diffusion_model.input_blocks.0.0.weight": torch.ones(8, 4, 3, 3)}


def t5_canonical(
    spec: T5Spec = SMALL_T5, seed: int = 0, *, dtype: torch.dtype = torch.float16
) -> Tensors:
    return dict(seeded_tensors(spec, seed=seed, dtype=dtype))


def t5(prefix: str, spec: T5Spec = SMALL_T5) -> Tensors:
    return prefixed(t5_canonical(spec), prefix)


def prefixed(tensors: Tensors, prefix: str) -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}


IDS = torch.arange(77).expand(1, -1).contiguous()
HF = "text_model."
ONE_ENCODER: dict[str, Callable[[Tensors], Tensors]] = {
    "transformers text model": hugging_face,
    "transformers text model, flat": lambda t: hugging_face(t, ""),
    "transformers full model": lambda t: {
        **hugging_face(t),
        **image_tower(),
        "visual_projection.weight": torch.ones(64, 64),
        "logit_scale": torch.tensor(4.6),
        "text_model.embeddings.position_ids": IDS,
    },
    "DataParallel": lambda t: hugging_face(t, "module.text_model.", "module." + PROJECTION),
    "SD1.5": lambda t: {
        **unet(),
        **hugging_face(t, "cond_stage_model.transformer.text_model.", ""),
        "cond_stage_model.transformer.text_model.embeddings.position_ids": IDS,
    },
    "SD1.5, flat": lambda t: {**unet(), **hugging_face(t, "cond_stage_model.transformer.", "")},
    "SD2": lambda t: {
        **unet(),
        **openai(t, "cond_stage_model.model."),
        "cond_stage_model.model.attn_mask": torch.zeros(77, 77),
        "cond_stage_model.model.logit_scale": torch.tensor(4.6),
    },
    "SDXL refiner": lambda t: {**unet(), **openai(t, "conditioner.embedders.0.model.")},
    "FLUX with T5": lambda t: {
        **hugging_face(
            t,
            "text_encoders.clip_l.transformer.text_model.",
            "text_encoders.clip_l.transformer." + PROJECTION,
        ),
        **t5("text_encoders.t5xxl.transformer."),
        "text_encoders.clip_l.logit_scale": torch.tensor(4.6),
    },
    "SD2 in ComfyUI": lambda t: hugging_face(
        t,
        "text_encoders.clip_h.transformer.text_model.",
        "text_encoders.clip_h.transformer." + PROJECTION,
    ),
    "CLIPSave": lambda t: hugging_face(
        t, "clip_l.transformer.text_model.", "clip_l.transformer." + PROJECTION
    ),
    "CLIPSave, old": lambda t: hugging_face(
        t, "clip_g.transformer.text_model.", "clip_g.text_projection"
    ),
    "OpenAI": lambda t: {
        **openai(t),
        **openai_image_tower(),
        "logit_scale": torch.tensor(4.6),
        "context_length": torch.tensor(77),
    },
    "OpenCLIP, projection as a linear": lambda t: openai(t, "", PROJECTION),
    "OpenCLIP, text apart": lambda t: {**openai(t, "text."), **openai_image_tower()},
    "OpenAI names under text_model": lambda t: openai(t, "text_model."),
}


def write(path: Path, tensors: Mapping[str, torch.Tensor], metadata=None) -> Path:
    save_file({k: v.clone().contiguous() for k, v in tensors.items()}, path, metadata)
    return path


def header_bytes(entries: Mapping[str, object]) -> bytes:
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header


def write_sparse(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str = "F16") -> Path:
    """A safetensors file of zeros that takes no space on disk (where its file system allows)."""
    entries, end = {}, 0
    for name, shape in shapes.items():
        size = {"F8_E4M3": 1, "F16": 2, "BF16": 2, "F32": 4}[dtype] * torch.Size(shape).numel()
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    head = header_bytes(entries)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + end)
    return path
