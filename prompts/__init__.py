# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The prompts that calibrate and verify, shipped as CLIP token ids so that no tokenizer is needed.

`calibration.jsonl` and `held_out.jsonl` hold the texts, written for this purpose; the two
`.tokens.json` files are made from them by `tools/tokenize_prompts.py`. Both sets are ordered so
that every prefix is a mixture of kinds and lengths: a recipe may take the first N. The texts are
tokenized as written; prompt weights stay in, which a host may parse away.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from ..encoders.clip import END_TOKEN, START_TOKEN
from ..errors import FileError

SetName = Literal["calibration", "held_out"]

SCHEMA = 1
_FOLDER = Path(__file__).parent

__all__ = ["SetName", "load_tokens", "padded", "set_id"]


def load_tokens(set_name: SetName) -> list[list[int]]:
    """Token ids of each prompt, without start and end, at most 246 (LongCLIP's 248 positions).

    The first is the empty prompt, `[]`. In the held-out set the first three, with start and end,
    take 2, 20 and (cut) 77 tokens. Raises FileError where the shipped file is missing or damaged.
    """
    path = _FOLDER / f"{set_name}.tokens.json"
    try:
        document = json.loads(path.read_bytes())
        if document["schema"] != SCHEMA:
            raise ValueError(f"its schema is {document['schema']}, not {SCHEMA}")
        return [list(map(int, row)) for row in document["tokens"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        fault = f"the shipped prompts cannot be read ({type(error).__name__}: {error})"
        raise FileError(path, fault, "install Octavo again") from error


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


def set_id(set_name: SetName) -> str:
    """16 hex digits that change with any token or its place; part of the checkpoint key."""
    content = json.dumps(load_tokens(set_name), separators=(",", ":"))
    return hashlib.sha256(content.encode("ascii")).hexdigest()[:16]
