# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Model files, read lazily: safetensors, torch files, shards, and the folders they come in.

The only module that opens model files. Whatever is wrong with one becomes a `FileError`. Headers of
safetensors are read without torch, so that recognition and the cached path never import it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
import zipfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import FileError, UnsupportedEncoder

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
DAMAGED = "the file is damaged or incomplete: download or save it again"
_PLAIN = "give the fp16, bf16 or fp32 safetensors file of the same encoder"

# Bits of one element, by the format's names of dtypes.
_BITS = {
    dtype: bits
    for bits, dtypes in (
        (4, "F4"),
        (6, "F6_E2M3 F6_E3M2"),
        (8, "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ"),
        (16, "I16 U16 F16 BF16"),
        (32, "I32 U32 F32"),
        (64, "I64 U64 F64 C64"),
    )
    for dtype in dtypes.split()
}
_TORCH_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt"}
_NESTED_UNDER = ("state_dict", "model_state_dict", "model", "module", "text_encoder")
_NOT_WEIGHTS = {
    b"GGUF": ("is a GGUF file, whose weights are quantized", _PLAIN),
    b"version https://git-lfs": ("is a Git LFS pointer, not the file", "run `git lfs pull`"),
    **dict.fromkeys(
        (b"<!doctype", b"<html"), ("is a web page, not the file", "download the file itself")
    ),
}

# What a folder's weights are called, in the order they are preferred.
STANDARD_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "model.fp16.safetensors",
    "model.safetensors.index.fp16.json",
    "open_clip_model.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "open_clip_pytorch_model.bin",
)
_INDEX = re.compile(r"\.index(\.\w+)?\.json$")
_SHARD = re.compile(r"-\d{5}-of-\d{5}(?=\.)")
_TEXT_ENCODER_FOLDER = re.compile(r"text_encoder(_\d)?")


@dataclass(frozen=True)
class TensorInfo:
    """What a header tells of a tensor; the dtype by its safetensors name ("F16", "BF16", ...)."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Config:
    """A config.json or open_clip_config.json. `binding`: the user gave the folder that holds it.

    `quantization`: what it, or ModelOpt's hf_quant_config.json beside it, says of the weights.
    """

    path: Path
    values: Mapping[str, Any]
    binding: bool
    quantization: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class FileIdentity:
    """What shows that a file on disk has not changed. `ctime_ns` is 0 on Windows (birth there)."""

    path: str
    size: int
    mtime_ns: int
    inode: int
    ctime_ns: int

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> FileIdentity:
        """Raises OSError."""
        real = os.path.realpath(path)
        status = os.stat(real)
        ctime_ns = status.st_ctime_ns if os.name == "posix" else 0
        return cls(real, status.st_size, status.st_mtime_ns, status.st_ino, ctime_ns)


def shown(name: str) -> str:
    """A name out of a file, fit for one line of a message."""
    text = ascii(name)
    return text if len(text) <= 120 else text[:100] + "...'"


class _Source:
    """One file on disk: its tensors by name."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    digest: str

    def __init__(self, path: Path) -> None:
        self.path = path
        self.identity = FileIdentity.of(path)

    def read(self, name: str) -> torch.Tensor:
        """The tensor, backed by the mapped file. Raises FileError."""
        # Touching a mapped page that is no longer in the file kills the process: look before.
        self.check()
        return self._map(name)

    def values(self, names: Collection[str]) -> dict[str, bytes]:
        """The little-endian bytes of small tensors, read without torch where the format allows.

        Raises FileError.
        """
        self.check()
        return {name: self._bytes(self._map(name)) for name in names}

    @staticmethod
    def _bytes(tensor: torch.Tensor) -> bytes:
        import torch

        found: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return found

    def check(self) -> None:
        """Raise FileError unless the file is the one that was opened."""
        try:
            now = replace(FileIdentity.of(self.path), ctime_ns=self.identity.ctime_ns)
        except OSError:
            now = None
        if now != self.identity:  # but for ctime, which a new hard link changes too
            raise FileError(self.path, "changed while it was being read", "start again")

    def _map(self, name: str) -> torch.Tensor:
        raise NotImplementedError

    def close(self) -> None:
        """Let the file go; a later `read` opens it again."""


class _Safetensors(_Source):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._handle: Any = None
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, self.identity.size - 8):
                raise FileError(path, f"its header claims {length} bytes", DAMAGED)
            header = file.read(length)
        self.digest = hashlib.sha256(header).hexdigest()
        body_bytes = self.identity.size - 8 - length
        self.tensors, self.metadata, self._spans = _parse_header(path, header, body_bytes)
        self._body_start = 8 + length

    def values(self, names: Collection[str]) -> dict[str, bytes]:
        self.check()
        found = {}
        try:
            with self.path.open("rb") as file:
                for name in names:
                    start, stop = self._spans[name]
                    file.seek(self._body_start + start)
                    found[name] = file.read(stop - start)
                    if len(found[name]) != stop - start:
                        raise OSError("the file is shorter than its header says")
        except OSError as error:
            fault = f"tensor {shown(name)} cannot be read ({_first_line(error)})"
            raise FileError(self.path, fault, DAMAGED) from error
        return found

    def _map(self, name: str) -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        try:
            if self._handle is None:
                self._handle = safe_open(str(self.path), framework="pt")
            tensor: torch.Tensor = self._handle.get_tensor(name)
        except (SafetensorError, OSError, ValueError, RuntimeError, MemoryError) as error:
            fault = f"tensor {shown(name)} cannot be read ({_first_line(error)})"
            raise FileError(self.path, fault, DAMAGED) from error
        return tensor

    def close(self) -> None:
        self._handle = None


def _parse_header(
    path: Path, header: bytes, body_bytes: int
) -> tuple[dict[str, TensorInfo], dict[str, str], dict[str, tuple[int, int]]]:
    """Check a safetensors header as strictly as its specification: the offsets tile the body.

    Tensors, metadata, and where in the body each tensor lies (start, stop).
    """

    def damaged(fault: str) -> FileError:
        return FileError(path, fault, DAMAGED)

    try:
        if header[:1] != b"{":
            raise ValueError("it does not start with {")
        entries = json.loads(header.decode(), object_pairs_hook=_without_duplicates)
        metadata = entries.pop("__metadata__", {})
        for name in entries:
            name.encode()  # a lone surrogate is no name, and could not even be printed
    except (ValueError, RecursionError) as error:
        raise damaged(f"its header is not valid JSON ({_first_line(error)})") from error
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise damaged("its header's __metadata__ is not a map of strings")

    tensors: dict[str, TensorInfo] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in entries.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise damaged(f"its header does not describe tensor {shown(name)}")
        dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _BITS:
            fault = f"tensor {shown(name)} has the unknown dtype {shown(str(dtype))}"
            raise FileError(path, fault, "save it as F16, BF16 or F32")
        if not _are_sizes(shape) or not _are_sizes(span) or len(span) != 2:
            raise damaged(f"tensor {shown(name)} has a shape or offsets that are no sizes")
        bits = _BITS[dtype]
        for size in shape:
            bits *= size
        if bits != 8 * (span[1] - span[0]):
            raise damaged(f"tensor {shown(name)} does not fill its {span[1] - span[0]} bytes")
        tensors[name] = TensorInfo(dtype, tuple(shape))
        spans.append((span[0], span[1], name))
    end = 0
    for start, stop, name in sorted(spans):
        if start != end:
            raise damaged(f"tensor {shown(name)} starts at byte {start}, not at {end}")
        end = stop
    if end != body_bytes:
        raise damaged(f"its tensors take {end} bytes and the file holds {body_bytes}")
    return tensors, metadata, {name: (start, stop) for start, stop, name in spans}


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a name appears twice")
    return mapping


def _are_sizes(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= 16
        and all(type(v) is int and 0 <= v < 1 << 63 for v in value)
    )


def _first_line(error: BaseException) -> str:
    """The first line of another library's message, cut to fit into a sentence."""
    lines = str(error).strip().splitlines()
    return (lines[0][:160] if lines else type(error).__name__).rstrip(".;: ")


class _TorchFile(_Source):
    """A file of `torch.save`. Its names are in a pickle, so that even listing them needs torch."""

    metadata: Mapping[str, str] = {}

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        edge = 64 * 1024
        with path.open("rb") as file:
            digest = hashlib.sha256(file.read(edge))
            file.seek(max(0, self.identity.size - edge))
            digest.update(file.read(edge))
        digest.update(str(self.identity.size).encode())
        self.digest = digest.hexdigest()
        self._state: Mapping[str, torch.Tensor] | None = _load_torch(path)
        self.tensors = {
            name: TensorInfo(_torch_dtype(tensor), tuple(tensor.shape))
            for name, tensor in self._state.items()
        }

    def _map(self, name: str) -> torch.Tensor:
        if self._state is None:
            self._state = _load_torch(self.path)
        return self._state[name].detach()

    def close(self) -> None:
        self._state = None


def _torch_dtype(tensor: torch.Tensor) -> str:
    """torch.bfloat16 -> BF16; the odd ones too get a name, so that they can be refused by it."""
    name = str(tensor.dtype).removeprefix("torch.").upper()
    name = {"FLOAT8_E4M3FN": "F8_E4M3", "FLOAT8_E8M0FNU": "F8_E8M0"}.get(name, name)
    return name.replace("FLOAT", "F").replace("UINT", "U").replace("INT", "I")


class _Inert:
    """Stands in, while a file is read, for the few harmless names that old training checkpoints
    hold beside their tensors; its instances hold nothing and do nothing."""

    def __new__(cls, *_: object) -> _Inert:
        return object.__new__(cls)

    def __setstate__(self, state: object) -> None:
        pass


_INERT_NAMES = (
    "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint",  # SD1.x .ckpt
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "numpy.dtype",
    "_codecs.encode",
)


def _load_torch(path: Path) -> Mapping[str, torch.Tensor]:
    """The tensors of a torch file by name, mapped where its format allows. Raises FileError."""
    import torch

    convert = "convert it to safetensors where it came from, or download it again"
    with path.open("rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"
    try:
        if is_zip:
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
            if any(name.endswith("/constants.pkl") for name in names):
                remedy = "load it with torch.jit.load and save its state_dict() as safetensors"
                raise FileError(path, "is a TorchScript archive, a program beside weights", remedy)
        comfy_utils = sys.modules.get("comfy.utils")
        if comfy_utils is not None:  # inside ComfyUI its rules for unsafe files hold
            loaded: object = comfy_utils.load_torch_file(str(path), safe_load=True)
        else:
            with torch.serialization.safe_globals([(_Inert, name) for name in _INERT_NAMES]):
                # A legacy file, which is no zip, cannot be mapped.
                loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except FileError:
        raise
    except Exception as error:  # a damaged pickle can raise anything at all
        reason = _first_line(error)
        if "weights_only" in str(error):  # then torch tells at length how to load it all the same
            reason = "it is damaged, or holds other objects, which could run code"
        fault = f"cannot be read as tensors alone ({reason})"
        raise FileError(path, fault, convert) from error
    tensors = {
        name: tensor
        for name, tensor in _state_dict(loaded).items()
        if tensor.layout is torch.strided and tensor.device.type == "cpu"
    }
    if not tensors:
        raise FileError(path, "holds no tensors by name", "give a file with a state_dict")
    return tensors


def _state_dict(loaded: object, depth: int = 3) -> dict[str, torch.Tensor]:
    """The named tensors of a loaded file, which trainers nest under a key or two."""
    import torch

    if not isinstance(loaded, Mapping):
        return {}
    for key in _NESTED_UNDER if depth else ():
        inner = _state_dict(loaded.get(key), depth - 1)
        if inner:
            return inner
    return {k: v for k, v in loaded.items() if isinstance(k, str) and isinstance(v, torch.Tensor)}


class WeightsFile:
    """A model as the user has it, read-only: one file, the shards of one, or a folder of several.

    `tensors` by name (in a pipeline folder "text_encoder_2/" and so on stand before the name),
    `metadata` of its safetensors headers, `configs` by the prefix they are for, `header_digest`
    (hex) of all headers, `identities` of all files it was read from, taken before reading, after
    `opened_ns`. A context manager; after `close` a read opens the file again.
    """

    def __init__(
        self,
        path: Path,
        sources: Iterable[tuple[str, _Source, Collection[str] | None]],
        *,
        configs: Mapping[str, Config],
        opened_ns: int,
        others: Iterable[FileIdentity] = (),
    ) -> None:
        """`sources`: prefix, file, and which of its tensors (None: all); `others`: index files."""
        self.path, self.configs, self.opened_ns = path, configs, opened_ns
        self._places: dict[str, tuple[_Source, str]] = {}
        self._sources: list[_Source] = []
        self.metadata: dict[str, str] = {}
        digest = hashlib.sha256()
        for prefix, source, names in sources:
            self._sources.append(source)
            self.metadata.update(source.metadata)
            digest.update(f"{prefix}\n{source.path.name}\n{source.digest}\n".encode())
            for name in source.tensors if names is None else names:
                self._places[prefix + name] = source, name
        only = self._sources[0].digest if len(self._sources) == 1 else None
        self.header_digest: str = only or digest.hexdigest()
        self.identities = (*(s.identity for s in self._sources), *others)
        self.tensors: Mapping[str, TensorInfo] = {
            name: source.tensors[inner] for name, (source, inner) in self._places.items()
        }

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The config that belongs to the whole of it; None in a pipeline folder or without one."""
        config = self.configs.get("")
        return (config.values or None) if config else None

    def read(self, name: str) -> torch.Tensor:
        """The tensor under its name in the file, mapped, in the file's dtype. Raises FileError."""
        source, inner = self._places[name]
        return source.read(inner)

    def values(self, names: Iterable[str]) -> dict[str, bytes]:
        """The little-endian bytes of small tensors; of a safetensors file without torch.

        Raises FileError.
        """
        found: dict[str, bytes] = {}
        wanted: dict[_Source, dict[str, str]] = {}
        for name in names:
            source, inner = self._places[name]
            wanted.setdefault(source, {})[inner] = name
        for source, inners in wanted.items():
            found |= {inners[inner]: data for inner, data in source.values(inners).items()}
        return found

    def check(self) -> None:
        """Raise FileError if a file has changed since it was opened: touch no tensor of it then."""
        for source in self._sources:
            source.check()

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def __enter__(self) -> WeightsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_weights(path: str | os.PathLike[str]) -> WeightsFile:
    """Open a model file, an index of shards, a model folder or a pipeline folder.

    Only headers are read (of torch files the pickle). Raises FileError; of GGUF UnsupportedEncoder.
    """
    path = Path(path)
    try:
        return _open(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        fault = f"cannot be opened ({str(reason).rstrip('.')})"
        raise FileError(path, fault, "check the path and its permissions") from error


def _open(path: Path) -> WeightsFile:
    opened_ns = time.time_ns()
    sources: list[tuple[str, _Source, Collection[str] | None]] = []
    others: list[FileIdentity] = []
    configs: dict[str, Config] = {}
    for prefix, main in _mains(path):
        if _INDEX.search(main.name):
            others.append(FileIdentity.of(main))
            sources += ((prefix, *shard) for shard in _shards(main))
        else:
            sources.append((prefix, _source(main), None))
        if path.is_dir() or main.name in STANDARD_NAMES:
            config = _config_beside(main, binding=path.is_dir())
            if config:
                configs[prefix] = config
    return WeightsFile(path, sources, configs=configs, opened_ns=opened_ns, others=others)


def _mains(path: Path) -> list[tuple[str, Path]]:
    """The weights file or index that the path means; in a pipeline one for each text encoder."""
    if path.is_file():
        index = _index_of_shard(path)
        if index:
            fault = f"is one shard of several, listed in {index.name}"
            raise FileError(path, fault, "give that index or the folder")
        return [("", path)]
    if not path.is_dir():
        if path.exists():
            raise FileError(path, "is neither a file nor a folder", "check the path")
        raise FileError(path, "does not exist", "check the path; a model must be on this disk")
    if not (path / "model_index.json").is_file():
        main = _main_of(path)
        if main:
            return [("", main)]
        remedy = "give a model file, a text encoder's folder or a diffusers pipeline's folder"
        raise FileError(path, "is a folder without a recognisable model", remedy)
    mains = []
    for folder in sorted(path.iterdir()):
        if _TEXT_ENCODER_FOLDER.fullmatch(folder.name) and folder.is_dir():
            main = _main_of(folder)
            if main:
                mains.append((folder.name + "/", main))
    if not mains:
        fault = "is a pipeline folder without the weights of a text encoder"
        raise FileError(path, fault, "download its text_encoder folders too")
    return mains


_ENDINGS = ("*.index.json", "*.safetensors")


def _main_of(folder: Path) -> Path | None:
    for name in STANDARD_NAMES:
        if (folder / name).is_file():
            return folder / name
    found = ([p for p in folder.glob(ending) if p.is_file()] for ending in _ENDINGS)
    others = next(filter(None, found), [])
    if len(others) > 1:
        names = ", ".join(sorted(shown(p.name) for p in others)[:4])
        fault = f"holds {len(others)} model files and none is named model.safetensors"
        raise FileError(folder, fault, f"give one of them ({names}, ...)")
    return others[0] if others else None


def _index_of_shard(path: Path) -> Path | None:
    if not _SHARD.search(path.name):
        return None
    index = path.with_name(_SHARD.sub("", path.name) + ".index.json")
    return index if index.is_file() else None


def _source(path: Path) -> _Source:
    """The file, opened by what it holds; its suffix counts only if its first bytes tell nothing."""
    with path.open("rb") as file:
        head = file.read(32)
    if not head:
        raise FileError(path, "is empty", "download or save it again")
    for magic, (fault, remedy) in _NOT_WEIGHTS.items():
        if head.lower().startswith(magic.lower()):
            raise UnsupportedEncoder(path, fault, remedy)
    suffix = path.suffix.lower()
    if head[8:9] == b"{":
        return _Safetensors(path)
    is_torch = head.startswith((b"PK\x03\x04", b"\x80\x02"))
    if suffix in (".safetensors", ".sft"):
        if is_torch:  # torch.load itself goes by this suffix
            raise FileError(path, "is a torch file under another name", "rename it to end in .pt")
        return _Safetensors(path)
    if is_torch or suffix in _TORCH_SUFFIXES:
        return _TorchFile(path)
    raise FileError(path, "is neither a safetensors nor a torch file", _PLAIN)


def _shards(index: Path) -> list[tuple[_Source, list[str]]]:
    """The files an index names, each with the tensors that are taken from it."""
    weight_map = _read_json(index).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(shard, str) for shard in weight_map.values())
    ):
        raise FileError(index, "has no weight_map from tensors to shards", DAMAGED)
    shards = []
    for shard in sorted(set(weight_map.values())):
        path = index.parent / shard
        if re.search(r"[/\\:\0]", shard) or shard in ("", ".", ".."):
            fault = f"names the shard {shown(shard)}, which is not beside it"
            raise FileError(index, fault, "use an index whose shards are in its own folder")
        if not path.is_file():
            fault = f"its shard {shown(shard)} is missing"
            raise FileError(index, fault, "download all shards into its folder")
        source = _source(path)
        names = sorted(name for name, where in weight_map.items() if where == shard)
        for name in names:
            if name not in source.tensors:
                fault = f"tensor {shown(name)}, listed in {index.name}, is missing"
                raise FileError(path, fault, DAMAGED)
        shards.append((source, names))
    return shards


def _config_beside(main: Path, *, binding: bool) -> Config | None:
    names = ["config.json", "open_clip_config.json"]
    quantization = _quantization_beside(main)
    for name in reversed(names) if main.name.startswith("open_clip") else names:
        path = main.with_name(name)
        if path.is_file():
            values = _read_json(path)
            return Config(path, values, binding, quantization or _said_of_quantization(values))
    return Config(main.with_name(_MODELOPT), {}, binding, quantization) if quantization else None


_MODELOPT = "hf_quant_config.json"


def _quantization_beside(main: Path) -> Mapping[str, Any] | None:
    """What ModelOpt's export says of the weights, in the terms of `quantization_config`."""
    path = main.with_name(_MODELOPT)
    if not path.is_file():
        return None
    said = _read_json(path).get("quantization")
    if not isinstance(said, dict):
        raise FileError(path, "names no quantization", "repair it or download it again")
    return {"quant_method": "modelopt", **said}


def _said_of_quantization(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    said = values.get("quantization_config")
    return said if isinstance(said, dict) else None


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > MAX_HEADER_BYTES:
            raise ValueError("it is too large")
        values = json.loads(path.read_bytes())
        if not isinstance(values, dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError) as error:
        fault = f"is not valid JSON ({_first_line(error)})"
        raise FileError(path, fault, "repair it or download it again") from error
    return values
