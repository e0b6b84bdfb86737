# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The prompts that calibrate and verify, shipped as token ids so that no tokenizer is needed.

`calibration.jsonl` and `held_out.jsonl` hold the texts, written for this purpose; the two
`.tokens.json` files (CLIP's ids) and the two `.t5.json` files (T5's) are made from them by
`tools/tokenize_prompts.py`. umT5 and T5 with another vocabulary are calibrated on T5's ids too,
which mean other words to them. Both sets are ordered so
that every prefix is a mixture of kinds and lengths: a recipe may take the first N. The texts are
tokenized as written; prompt weights stay in, which a host may parse away.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from ..encoders import t5
from ..encoders.clip import END_TOKEN, START_TOKEN
from ..errors import FileError, remedy_for

SetName = Literal["calibration", "held_out"]
Tokenizer = Literal["clip", "t5"]

SCHEMA = 1
_FOLDER = Path(__file__).parent

_SUFFIX: dict[Tokenizer, str] = {"clip": "tokens", "t5": "t5"}

__all__ = ["SetName", "Tokenizer", "batched_t5", "load_tokens", "padded", "padded_t5", "set_id"]


def load_tokens(set_name: SetName, tokenizer: Tokenizer = "clip") -> list[list[int]]:
    """Token ids of each prompt, without start and end.

    CLIP's are at most 246 (LongCLIP's 248 positions), T5's 255. The first prompt is the empty one,
    `[]`. In CLIP's held-out set the first three, with start and end, take 2, 20 and (cut) 77
    tokens. Raises FileError where the shipped file is missing or damaged.
    """
    path = _FOLDER / f"{set_name}.{_SUFFIX[tokenizer]}.json"
    try:
        document = json.loads(path.read_bytes())
        if document["schema"] != SCHEMA:
            raise ValueError(f"its schema is {document['schema']}, not {SCHEMA}")
        return [list(map(int, row)) for row in document["tokens"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        fault, remedy = f"({type(error).__name__}: {error})", "install Octavo again"
        if isinstance(error, OSError):
            fault, remedy = f"({error.strerror or error})", remedy_for(error, remedy)
        raise FileError(path, f"the shipped prompts cannot be read {fault}", remedy) from error


def padded(tokens: Iterable[Sequence[int]], positions: int, pad: int) -> list[list[int]]:
    """Rows `[start, ids..., end, pad...]` of exactly `positions` ids, as the hosts build them.

    A prompt that is too long loses ids at its end, never the end token. `pad` is the end token for
    CLIP-L and 0 for CLIP-H and CLIP-G.
    """
    if positions < 2:
        raise ValueError(f"positions is {positions}, but start and end token alone need 2")
    rows = []
    for ids in tokens:
        row = [START_TOKEN, *ids[: positions - 2], END_TOKEN]
        rows.append(row + [pad] * (positions - len(row)))
    return rows


def padded_t5(
    tokens: Iterable[Sequence[int]], length: int, vocabulary: int = t5.VOCABULARY
) -> list[list[int]]:
    """Rows `[ids..., end, pad...]` of `length` ids, cut before the end token, as hosts build them.

    Ids past a smaller `vocabulary` are folded into it.
    """
    if length < 1:
        raise ValueError(f"length is {length}, but the end token alone needs 1")
    rows = []
    for ids in tokens:
        row = [*(i % vocabulary for i in ids[: length - 1]), t5.END_TOKEN]
        rows.append(row + [t5.PAD_TOKEN] * (length - len(row)))
    return rows


def batched_t5(
    tokens: Iterable[Sequence[int]], size: int, vocabulary: int = t5.VOCABULARY
) -> list[list[list[int]]]:
    """The prompts by length, `size` together, each batch as long as its longest with the end."""
    by_length = sorted(tokens, key=len)
    batches = [by_length[start : start + size] for start in range(0, len(by_length), size)]
    return [padded_t5(batch, len(batch[-1]) + 1, vocabulary) for batch in batches]


def set_id(set_name: SetName, tokenizer: Tokenizer = "clip") -> str:
    """16 hex digits that change with any token or its place; part of the checkpoint key."""
    content = json.dumps(load_tokens(set_name, tokenizer), separators=(",", ":"))
    return hashlib.sha256(content.encode("ascii")).hexdigest()[:16]
