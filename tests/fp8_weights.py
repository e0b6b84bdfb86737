# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Seeded encoders quantized for the tests of `torch_fp8`, on the CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial

import torch
from octavo import prompts
from octavo.backends.fp8_ops import Fp8Linear, Fp8Weights, quantize_input
from octavo.backends.torch_ops import ReferenceEncoder, embed_tokens
from octavo.checkpoints.quantized import quantized_tensors
from octavo.encoders import ClipSpec, EncoderSpec, T5Spec
from octavo.encoders.clip import POSITIONS
from octavo.recipes import load_recipe
from octavo.seeded import TINY, seeded_tensors
from torch import Tensor, nn


def seeded(spec: ClipSpec, seed: int = 0) -> dict[str, Tensor]:
    return dict(seeded_tensors(spec, seed=seed, projection=False))


@cache
def tiny(spec: ClipSpec = TINY) -> dict[str, Tensor]:
    return seeded(spec)


def random_embeds(spec: ClipSpec, batch: int, *, seed: int = 0) -> Tensor:
    """Of the size that token embeddings have, [B, S, C] in FP32."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(batch, spec.positions, spec.width, generator=random) * 0.02


def prompt_embeds(
    spec: ClipSpec, tensors: Mapping[str, Tensor], count: int, name: prompts.SetName = "held_out"
) -> Tensor:
    """Of `count` shipped prompts, padded to the encoder's length, [count, S, C] in FP32."""
    rows = prompts.padded(prompts.load_tokens(name)[:count], spec.positions, spec.pad_token)
    return embed_tokens(tensors.__getitem__, rows)


def watched(
    spec: EncoderSpec, tensors: Mapping[str, Tensor]
) -> tuple[ReferenceEncoder, dict[str, Tensor]]:
    """(the FP32 reference, the largest input of every linear so far, as it runs)."""
    reference, found = ReferenceEncoder(spec, tensors.__getitem__), dict[str, Tensor]()

    def note(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        found[name] = torch.maximum(inputs[0].abs().amax(), found.get(name, torch.zeros(())))

    for name, module in reference.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(partial(note, name))
    return reference, found


@torch.no_grad()
def input_amax(spec: ClipSpec, tensors: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Largest input of every linear over `count` calibration prompts."""
    reference, found = watched(spec, tensors)
    reference(prompt_embeds(spec, tensors, count, "calibration"))
    return found


def checkpoint_tensors(
    spec: ClipSpec, tensors: Mapping[str, Tensor], recipe: str = "fp8", *, count: int = 4
) -> dict[str, Tensor]:
    """The tensors of the checkpoint that `recipe` makes of an encoder."""
    structure = load_recipe(recipe).structure(spec.linears())
    amax = input_amax(spec, tensors, count)
    return quantized_tensors(spec, tensors.__getitem__, structure, amax)


def fp8_weights(
    spec: ClipSpec, tensors: Mapping[str, Tensor], recipe: str = "fp8", *, count: int = 4
) -> Fp8Weights:
    made = checkpoint_tensors(spec, tensors, recipe, count=count)
    return Fp8Weights.from_tensors(spec, made, getattr(torch, load_recipe(recipe).body))


@cache
def tiny_weights(recipe: str = "fp8", spec: ClipSpec = TINY) -> Fp8Weights:
    return fp8_weights(spec, tiny(spec), recipe)


def t5_embeds(spec: T5Spec, tensors: Mapping[str, Tensor], batch: int, tokens: int) -> Tensor:
    """Of random tokens, [B, S, C] in FP32; T5's embeddings are as large as its weights say."""
    random = torch.Generator().manual_seed(tokens)
    ids = torch.randint(2, spec.vocabulary, (batch, tokens), generator=random)
    return tensors[spec.token_table][ids].float()


def t5_checkpoint_tensors(
    spec: T5Spec, tensors: Mapping[str, Tensor], recipe: str = "fp8"
) -> dict[str, Tensor]:
    """The tensors of the checkpoint that `recipe` makes of a T5, ranges from random tokens."""
    structure = load_recipe(recipe).structure(spec.linears())
    reference, found = watched(spec, tensors)
    with torch.no_grad():
        for tokens in (1, 16, 60, 200):
            reference(t5_embeds(spec, tensors, 4, tokens))
    return quantized_tensors(spec, tensors.__getitem__, structure, found)


def t5_weights(spec: T5Spec, tensors: Mapping[str, Tensor], recipe: str = "fp8") -> Fp8Weights:
    """T5's body is BF16 under every recipe."""
    made = t5_checkpoint_tensors(spec, tensors, recipe)
    return Fp8Weights.from_tensors(spec, made, torch.bfloat16)


def random_weights(spec: ClipSpec, device: torch.device, *, std: float = 0.02) -> Fp8Weights:
    """Of full size, drawn on a GPU in milliseconds: for times, memory and equality."""
    random = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=random, device=device) * std).half()

    one = torch.ones(spec.width, device=device).half()
    scale = torch.tensor(0.02, device=device)
    linears = {}
    for name, (out, inner) in spec.linears().items():
        codes = quantize_input(normal(out, inner), torch.tensor(std / 100, device=device))
        linears[name] = Fp8Linear(codes, normal(out), scale / 100, scale)
    norms = {name: (one, normal(spec.width)) for name in spec.norms()}
    tables = {POSITIONS: normal(spec.positions, spec.width)}
    return Fp8Weights(spec, torch.float16, linears, norms, tables)
