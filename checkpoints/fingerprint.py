# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""What an encoder's weights are, whatever file they are in: a digest of their values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol

from ..encoders import EncoderSpec
from ..encoders.clip import PROJECTION
from ..errors import FileError
from .files import shown

if TYPE_CHECKING:
    import torch

_SCHEMA = b"octavo weights 1\n"
_BLOCK_BYTES = 16 * 1024 * 1024  # of fp32; bounds the memory, does not change the digest


class Weights(Protocol):
    """What is hashed: `EncoderWeights` of a file, or a host's live weights (compile.py)."""

    @property
    def spec(self) -> EncoderSpec: ...
    @property
    def projection_shape(self) -> tuple[int, int] | None: ...
    @property
    def scales(self) -> Sequence[str]:
        """Names of what belongs to FP8 weights beside their codes, in `side`'s terms."""
        ...

    @property
    def label(self) -> object:
        """The path, or whatever a person knows the weights by."""
        ...

    def stored(self, name: str) -> torch.Tensor:
        """The values of a canonical tensor, E4M3 codes as they are, on the CPU."""
        ...

    def side(self, name: str) -> tuple[str, torch.Tensor]:
        """(canonical name, value) of one of `scales`."""
        ...

    def sources(self, name: str) -> Sequence[str]:
        """What the canonical tensor `name` is called where it lies."""
        ...


@dataclass(frozen=True)
class Fingerprint:
    """SHA-256 (hex) of the text tower, token embeddings included, and of the projection or None."""

    body: str
    projection: str | None


def fingerprint(
    weights: Weights, progress: Callable[[int, int], None] | None = None
) -> Fingerprint:
    """Hash canonical names, shapes and values widened to fp32, little-endian, one block at a time.

    The same tensors give the same digests from any packaging, and from any of fp32, fp16 and bf16
    that holds the values exactly. E4M3 is hashed as it is, with the scales: another scale or other
    codes are other weights, and so are the same values in 16 bit, which would be quantized anew.
    `progress(done, total)` counts bytes of fp32. Raises FileError on NaN or infinity.
    """
    stored = weights.stored
    shapes: dict[str, tuple[int, ...]] = dict(weights.spec.tensors())
    total = 4 * sum(map(prod, (*shapes.values(), weights.projection_shape or (0,))))
    done = 0

    def feed(
        digest: hashlib._Hash, name: str, tensor: torch.Tensor, sources: Sequence[str]
    ) -> None:
        nonlocal done
        codes = _are_codes(tensor)
        facts = [name, tensor.shape, "e4m3"] if codes else [name, tensor.shape]
        digest.update(json.dumps(facts).encode() + b"\n")
        for block in _code_blocks(tensor) if codes else _blocks(tensor):
            if block is None:
                raise _not_finite(weights, tensor, sources)
            flat = block.reshape(-1).numpy()
            digest.update(flat.data if codes else flat.astype("<f4", copy=False).data)
            done += block.numel() * 4
            if progress:
                progress(done, total)

    body = hashlib.sha256(_SCHEMA)
    for name in shapes:
        feed(body, name, stored(name), weights.sources(name))
    for source in weights.scales:
        feed(body, *weights.side(source), (source,))
    if weights.projection_shape is None:
        return Fingerprint(body.hexdigest(), None)
    projection = hashlib.sha256(_SCHEMA)
    feed(projection, PROJECTION, stored(PROJECTION), weights.sources(PROJECTION))
    return Fingerprint(body.hexdigest(), projection.hexdigest())


def _are_codes(tensor: torch.Tensor) -> bool:
    import torch

    return tensor.dtype == torch.float8_e4m3fn


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor in order, some of its rows at a time."""
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)
    step = max(1, _BLOCK_BYTES // (4 * max(1, tensor[:1].numel())))
    for start in range(0, tensor.shape[0], step):
        yield tensor[start : start + step]


def _rows(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor in order, some of its rows at a time, widened to fp32."""
    import torch

    return (part.to(torch.float32).contiguous() for part in _parts(tensor))


def _code_blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor | None]:
    """As `_blocks`, the codes of E4M3 as bytes."""
    import torch

    for part in _parts(tensor):
        block = part.contiguous().view(torch.uint8)
        # Without its sign, NaN is the largest code; E4M3 has no infinity.
        yield None if int((block & 0x7F).amax()) == 0x7F else block


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor | None]:
    """The blocks of a tensor, or None in the place of one that is not finite."""
    import torch

    for block in _rows(tensor):
        lowest, highest = torch.aminmax(block)  # one pass; NaN comes through
        finite = bool(torch.isfinite(lowest) & torch.isfinite(highest))
        yield block if finite else None


def _not_finite(weights: Weights, tensor: torch.Tensor, sources: Sequence[str]) -> FileError:
    count = sum(block.numel() - int(block.isfinite().sum().item()) for block in _rows(tensor))
    names = " and ".join(shown(name) for name in sources)
    fault = f"tensor {names} holds {count} values that are NaN or infinite"
    return FileError(weights.label, fault, "download or save the file again")
