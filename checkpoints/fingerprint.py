# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""What an encoder's weights are, whatever file they are in: a digest of their values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..encoders.clip import PROJECTION
from ..errors import FileError
from .detect import EncoderWeights
from .files import shown

if TYPE_CHECKING:
    import torch

_SCHEMA = b"octavo weights 1\n"
_BLOCK_BYTES = 16 * 1024 * 1024  # of fp32; bounds the memory, does not change the digest


@dataclass(frozen=True)
class Fingerprint:
    """SHA-256 (hex) of the text tower, token embeddings included, and of the projection or None."""

    body: str
    projection: str | None


def fingerprint(
    weights: EncoderWeights, progress: Callable[[int, int], None] | None = None
) -> Fingerprint:
    """Hash canonical names, shapes and values widened to fp32, little-endian, one block at a time.

    The same tensors give the same digests from any packaging and from any of fp32, fp16 and bf16 that
    holds the values exactly. `progress(done, total)` counts bytes of fp32. Raises FileError on NaN
    or infinity, and for a checkpoint of Octavo's own, whose values are not the encoder's.
    """
    if weights.dtype == "fp8":
        fault = f"the encoder {weights.name} is in FP8 already"
        raise FileError(weights.file.path, fault, "give the file it was made from")
    shapes: dict[str, tuple[int, ...]] = weights.spec.tensors()
    if weights.projection_shape is not None:
        shapes[PROJECTION] = weights.projection_shape
    total = sum(_bytes(shape) for shape in shapes.values())
    done = 0
    body = hashlib.sha256(_SCHEMA)
    projection: str | None = None
    for name, shape in shapes.items():
        digest = hashlib.sha256(_SCHEMA) if name == PROJECTION else body
        digest.update(json.dumps([name, shape]).encode() + b"\n")
        for block in _blocks(weights, name):
            digest.update(block.numpy().astype("<f4", copy=False))
            done += block.numel() * 4
            if progress:
                progress(done, total)
        if name == PROJECTION:
            projection = digest.hexdigest()
    return Fingerprint(body.hexdigest(), projection)


def _bytes(shape: tuple[int, ...]) -> int:
    size = 4
    for n in shape:
        size *= n
    return size


def _blocks(weights: EncoderWeights, name: str) -> Iterator[torch.Tensor]:
    """The tensor's rows in order, fp32, contiguous and finite."""
    import torch

    tensor = weights.read(name)
    row = tensor[0].numel()
    step = max(1, _BLOCK_BYTES // (4 * row))
    for start in range(0, tensor.shape[0], step):
        block = tensor[start : start + step].to(torch.float32).contiguous()
        lowest, highest = torch.aminmax(block)  # one pass; NaN comes through
        if not bool(torch.isfinite(lowest) & torch.isfinite(highest)):
            count = sum(int((~torch.isfinite(rows)).sum()) for rows in tensor.split(step))
            source = " and ".join(shown(n) for n in weights.sources(name))
            fault = f"tensor {source} holds {count} values that are NaN or infinite"
            raise FileError(weights.file.path, fault, "download or save the file again")
        yield block
