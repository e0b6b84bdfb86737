# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Pipelines whose only text encoder is a T5, as far as `encode_prompt` needs them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import diffusers
import tiny_pipelines as tiny
import torch

CPU = torch.device("cpu")


def _made(kind: str, encoder: str = "T5", **options: Any) -> Any:
    torch.manual_seed(0)
    parts: dict[str, Any] = {"transformer": None, "vae": None, "scheduler": None, **options}
    return getattr(diffusers, kind)(
        tokenizer=tiny.t5_tokenizer(), text_encoder=tiny.t5_text(32, encoder), **parts
    )


def _wan() -> Any:
    pipe = _made("WanPipeline", "UMT5")
    if importlib.util.find_spec("ftfy") is None:  # diffusers 0.36 asks for it without looking
        module: Any = sys.modules[type(pipe).__module__]
        module.prompt_clean = str.strip
    return pipe


# name -> (the pipeline, what encode_prompt is asked beyond the prompt)
PIPELINES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "pixart": (
        lambda: _made("PixArtSigmaPipeline"),
        {"negative_prompt": "blurry", "max_sequence_length": 60},
    ),
    "chroma": (
        lambda: _made("ChromaPipeline"),
        {"negative_prompt": "blurry", "max_sequence_length": 60},
    ),
    "wan": (
        _wan,
        {"negative_prompt": "blurry", "max_sequence_length": 60},
    ),
    "auraflow": (
        lambda: _made("AuraFlowPipeline", "UMT5"),
        {"negative_prompt": "blurry", "max_sequence_length": 60},
    ),
    "ltx": (
        lambda: _made("LTXPipeline"),
        {"negative_prompt": "blurry", "max_sequence_length": 60},
    ),
    "mochi": (  # an empty prompt masks a whole row
        lambda: _made("MochiPipeline", force_zeros_for_empty_prompt=True),
        {"negative_prompt": "", "max_sequence_length": 60},
    ),
}


def embeddings(pipe: Any, prompt: Any, **options: Any) -> list[torch.Tensor]:
    """Every float tensor that `encode_prompt` gives."""
    with torch.no_grad():
        found = pipe.encode_prompt(prompt, device=CPU, **options)
    return [t for t in found if isinstance(t, torch.Tensor) and t.dim() == 3]
