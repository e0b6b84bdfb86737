# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""What an encoder's weights are, whatever file they are in: a digest of their values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Protocol

from ..encoders import EncoderSpec
from ..encoders.clip import PROJECTION
from ..errors import FileError
from ..threads import HASHING, submit
from .files import shown

if TYPE_CHECKING:
    import torch

_SCHEMA = b"octavo weights 2\n"
_PART = 2**24  # values that have a digest of their own, 64 MiB of fp32; another would change it
_BLOCK = 2**18  # values a thread widens at a time; bounds the memory, does not change the digest
_SERIAL = 2**14  # values; more than 2**15 torch shares out among threads of its own

# The least bits, without the sign, of what is NaN or infinite; E4M3 has no infinity.
_NOT_FINITE = {
    "torch.float32": 0x7F800000,
    "torch.float16": 0x7C00,
    "torch.bfloat16": 0x7F80,
    "torch.float8_e5m2": 0x7C,
    "torch.float8_e4m3fn": 0x7F,
}


class Weights(Protocol):
    """What is hashed: `EncoderWeights` of a file, or a host's live weights (compile.py).

    Asked by the thread that calls `fingerprint`, and by no other but for `check`.
    """

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
        """The values of a canonical tensor, E4M3 codes as they are, on any device.

        They must stay as they are while others are asked for.
        """
        ...

    def side(self, name: str) -> tuple[str, torch.Tensor]:
        """(canonical name, value) of one of `scales`."""
        ...

    def check(self) -> None:
        """Raise FileError if the memory of what `stored` gave may have gone. From any thread."""
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
    """Hash canonical names, shapes and values widened to fp32, little-endian, on several threads.

    Of every 2**24 values of a flattened tensor, the last ones fewer, a digest; of a tensor's name
    and shape (JSON, a line) and its parts' digests the tensor's; of the tensors' digests in order
    the fingerprint's. All SHA-256.

    The same tensors give the same digests from any packaging, and from any of fp32, fp16 and bf16
    that holds the values exactly. E4M3 is hashed as it is, with the scales: another scale or other
    codes are other weights, and so are the same values in 16 bit, which would be quantized anew.
    `progress(done, total)` counts bytes of fp32 and may raise to cancel. Raises FileError on NaN or
    infinity, for the first tensor that holds one.
    """
    shapes: dict[str, tuple[int, ...]] = dict(weights.spec.tensors())
    scales, projected = weights.scales, weights.projection_shape
    total = 4 * (sum(map(prod, (*shapes.values(), projected or (0,)))) + len(scales))
    with _Hashing(weights, total, progress) as hashing:
        body = [hashing.tensor(name) for name in shapes]
        body += [hashing.side(source) for source in scales]
        projection = hashing.tensor(PROJECTION) if projected is not None else None
        hashing.finish()
    return Fingerprint(_combined(body), None if projection is None else _combined([projection]))


@dataclass(frozen=True)
class _Tensor:
    """A tensor's name and shape, and the digests of its parts, which may be still to come."""

    facts: bytes
    parts: Sequence[Future[bytes | None]]

    def digest(self) -> bytes:
        digest = hashlib.sha256(self.facts)
        for part in self.parts:
            found = part.result()
            assert found is not None  # `finish` would have raised
            digest.update(found)
        return digest.digest()


def _combined(tensors: Sequence[_Tensor]) -> str:
    digest = hashlib.sha256(_SCHEMA)
    for tensor in tensors:
        digest.update(tensor.digest())
    return digest.hexdigest()


class _Hashing:
    """Tensors read by the calling thread and hashed by others; a context manager.

    At most one part more than there are threads is under way, so that none waits while the next is
    read. Leaving ends the threads, after the parts that they are at.
    """

    def __init__(
        self, weights: Weights, total: int, progress: Callable[[int, int], None] | None
    ) -> None:
        self._weights, self._progress = weights, progress
        self._done, self._total = 0, total
        # In canonical order: the part, its bytes of fp32, and what to say if it is not finite.
        self._pending: dict[Future[bytes | None], tuple[int, Callable[[], FileError]]] = {}

    def __enter__(self) -> _Hashing:
        self._threads = ThreadPoolExecutor(HASHING, "octavo-fingerprint")
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def tensor(self, name: str) -> _Tensor:
        """Hash the canonical tensor `name`. Raises as `fingerprint`."""
        try:
            tensor = self._weights.stored(name)
        except Exception:
            self._refuse()  # what comes first is told first
            raise
        return self._hash(name, tensor, self._weights.sources(name))

    def side(self, source: str) -> _Tensor:
        """Hash one of the weights' `scales`."""
        return self._hash(*self._weights.side(source), (source,))

    def finish(self) -> None:
        """Wait for all parts."""
        while self._pending:
            self._collect()

    def _hash(self, name: str, tensor: torch.Tensor, sources: Sequence[str]) -> _Tensor:
        codes = _are_codes(tensor)
        facts = [name, tensor.shape, "e4m3"] if codes else [name, tensor.shape]
        refusal = partial(_not_finite, self._weights, tensor, sources)
        parts = []
        for part in _parts(tensor):
            future = submit(self._threads, _digest, part, self._weights.check)
            self._pending[future] = 4 * part.numel(), refusal
            parts.append(future)
            del part  # the thread alone holds it now, and lets it go
            if len(self._pending) > HASHING:
                self._collect()
        return _Tensor(json.dumps(facts).encode() + b"\n", parts)

    def _collect(self) -> None:
        """Wait for any part, and tell of those that are done."""
        done, _ = wait(self._pending, return_when=FIRST_COMPLETED)
        if any(part.exception() or part.result() is None for part in done):
            self._refuse()  # or raise what a part ended in
        for part in done:
            size, _ = self._pending.pop(part)
            self._done += size
            if self._progress:
                self._progress(self._done, self._total)

    def _refuse(self) -> None:
        """Wait for the parts under way and raise for the first, in order, with a fault."""
        for part, (_, refusal) in self._pending.items():
            if part.result() is None:
                raise refusal()


def _are_codes(tensor: torch.Tensor) -> bool:
    import torch

    return tensor.dtype == torch.float8_e4m3fn


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The flattened tensor in order, `_PART` values at a time, each contiguous and on the CPU."""
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)
    row = max(1, tensor[:1].numel())
    for start in range(0, tensor.numel(), _PART):
        first, stop = start // row, start + _PART
        rows = tensor[first : -(-stop // row)]  # so that of a transposed one no more is copied
        yield rows.reshape(-1)[start - first * row : stop - first * row].cpu().contiguous()


def _digest(part: torch.Tensor, check: Callable[[], None]) -> bytes | None:
    """The SHA-256 of one of `_parts`, widened to fp32 if it is not codes; None if not finite.

    `check` is called before the part is touched. Runs beside others like it, so torch must not
    share its work out among further threads.
    """
    import torch

    codes = _are_codes(part)
    digest = hashlib.sha256()
    wide = torch.empty(0 if codes else min(_BLOCK, part.numel()), dtype=torch.float32)
    check()
    for block in part.split(_BLOCK):
        if str(block.dtype) not in _NOT_FINITE:
            block = block.to(torch.float32)
        if not _is_finite(block):
            return None
        if codes:
            digest.update(block.view(torch.uint8).numpy().data)
            continue
        if block.dtype != torch.float32:
            block = torch.cat(block.split(_SERIAL), out=wide[: block.numel()])
        digest.update(block.numpy().astype("<f4", copy=False).data)
    return digest.digest()


def _is_finite(block: torch.Tensor) -> bool:
    """Whether all values of one of `_NOT_FINITE`'s dtypes are finite, by their bits."""
    import torch

    size = block.element_size()
    bits = block.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]).numpy()
    unsigned = bits & ((1 << (8 * size - 1)) - 1)  # by NumPy, which starts no threads
    return int(unsigned.max()) < _NOT_FINITE[str(block.dtype)]


def _not_finite(weights: Weights, tensor: torch.Tensor, sources: Sequence[str]) -> FileError:
    count = sum(part.numel() - int(part.float().isfinite().sum()) for part in _parts(tensor))
    names = " and ".join(shown(name) for name in sources)
    fault = f"tensor {names} holds {count} values that are NaN or infinite"
    return FileError(weights.label, fault, "download or save the file again")
