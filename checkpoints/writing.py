# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Files for the user, whole or not at all, and safetensors into an open file.

`safetensors.torch.save_file` writes to a temporary file of its own, which a killed process leaves
behind under a name nobody can tell, and hides the system's error in a text.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..errors import FileError, OctavoBug

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_NAMES = {
    "float8_e4m3fn": "F8_E4M3",
    "uint8": "U8",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
}


@contextmanager
def whole_file(path: Path, remedy: str) -> Iterator[BinaryIO]:
    """`path` open for writing; it changes only once the block has ended well, and then at once.

    Folders on the way are made; a device or pipe is written in place. Raises `FileError` with
    `remedy`.
    """
    refuse_unwritable(path, remedy)
    try:
        target = Path(os.path.realpath(path))  # a link stays one
        if target.exists() and not target.is_file():
            with target.open("wb") as file:
                yield file
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        # A short name: that of the target may be as long as names can be.
        temporary = target.with_name(f".octavo-{secrets.token_hex(8)}.tmp")
        try:
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if target.exists():
                with suppress(OSError):
                    shutil.copymode(target, temporary)
            os.replace(temporary, target)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(path, error, remedy) from error


def refuse_unwritable(path: Path, remedy: str) -> None:
    """Raise the `FileError` that writing `path` would end in, as far as can be told without it."""
    try:
        if path.is_dir():
            raise FileError(path, "is a folder", "name a file in it")
        there = path
        while not there.exists() and there != there.parent:
            there = there.parent
        if there != path and not there.is_dir():
            raise FileError(path, f"cannot be written ({there} is no folder)", remedy)
        if not os.access(there, os.W_OK):
            raise FileError(path, f"cannot be written ({there} is read-only)", remedy)
    except (OSError, ValueError) as error:  # a name that is too long; a NUL
        raise _unwritable(path, error, remedy) from error


def _unwritable(path: Path, error: OSError | ValueError, remedy: str) -> FileError:
    reason = getattr(error, "strerror", None) or error
    return FileError(path, f"cannot be written ({reason})", remedy)


def write_safetensors(
    file: BinaryIO,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    type_of: Callable[[str], tuple[torch.dtype, tuple[int, ...]]] | None = None,
) -> None:
    """Tensors and metadata in the safetensors format; equal content gives equal bytes.

    Widest elements first, as `save_file` orders them, so that each tensor is aligned. `type_of`
    (dtype and shape) spares tensors that are made when asked for: they are asked for in the order
    of the file, one at a time. Raises OSError.
    """
    import torch

    if type_of is None:
        types = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    else:
        types = {name: type_of(name) for name in tensors}
    names = sorted(types, key=lambda name: (-types[name][0].itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name in names:
        dtype, shape = types[name]
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _NAMES[str(dtype).removeprefix("torch.")],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        tensor = tensors[name]
        if (tensor.dtype, tuple(tensor.shape)) != types[name]:
            raise OctavoBug(f"{name} is no longer {types[name]}")
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        file.write(flat.view(torch.uint8).numpy().data)
