# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""T5's relative bias: from the small table of a checkpoint to one value per (query, key)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def relative_buckets(
    length: int, buckets: int, max_distance: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Bucket int64 [S, S] of every (query, key); bit for bit transformers' bidirectional ones.

    Half of the buckets are for keys after the query. Of each half, the first half holds one
    distance each, the rest grow with the logarithm up to `max_distance`, the last takes all beyond.
    """
    half = buckets // 2
    exact = half // 2
    places = torch.arange(length, device=device)
    offset = places[None, :] - places[:, None]  # key minus query
    distance = offset.abs()
    grown = torch.log(distance.float() / exact) / math.log(max_distance / exact) * (half - exact)
    # A distance of 0 gives -inf, whose integer is discarded below.
    far = (exact + grown.clamp_min(0).long()).clamp_max(half - 1)
    return torch.where(distance < exact, distance, far) + (offset > 0) * half


def relative_bias(table: Tensor, length: int, max_distance: int) -> Tensor:
    """`table` [buckets, H] -> bias [1, H, S, S], contiguous, of the table's dtype and device."""
    places = relative_buckets(length, len(table), max_distance, table.device)
    return table.T[:, places][None].contiguous()


def relative_offsets(table: Tensor, length: int, max_distance: int) -> Tensor:
    """`table` [buckets, H] -> bias [H, 2 S - 1] by key minus query, which is all it depends on."""
    buckets = relative_buckets(length, len(table), max_distance, table.device)
    # The last query sees every key before it, the first every key after it.
    line = torch.cat((buckets[-1], buckets[0, 1:]))  # offsets 1 - S .. 0, 1 .. S - 1
    return table.T[:, line].contiguous()


COPIES = 8  # FP16 values in 16 bytes
REACH = 128


def shifted_offsets(table: Tensor, length: int, max_distance: int) -> Tensor:
    """`table` [buckets, H] -> FP16 [8, H, 2 R], R being `length` rounded up to a multiple of 128.

    Copy c holds at x the bias of a key that is x + c - R after its query. So whatever the query,
    one of the copies has the biases of 8 keys, counted from a multiple of 8, in 16 aligned bytes.
    FP16 holds every bias of a 16-bit table, but for those beyond 65,504, which are clamped to it.
    """
    reach = -(-length // REACH) * REACH
    limit = torch.finfo(torch.float16).max
    line = relative_offsets(table.float().clamp(-limit, limit).half(), reach, max_distance)
    line = torch.nn.functional.pad(line, (1, COPIES))  # offsets from -R; those added are not used
    return torch.stack([line[:, c : c + 2 * reach] for c in range(COPIES)])
