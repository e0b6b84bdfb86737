# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""What a ComfyUI text model holds: encoders, their live weights, and those under patches."""

from __future__ import annotations

import ctypes
import hashlib
import os
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property, partial
from typing import Any, cast

import comfy.lora
import comfy.model_patcher
import comfy.sd1_clip
import comfy.weight_adapter
import torch
from torch import Tensor, nn

from ..checkpoints import QuantizedLinear
from ..checkpoints.scales import Fp8
from ..encoders import EncoderSpec
from ..encoders.clip import POSITIONS, PROJECTION
from ..errors import OctavoError
from ..staging import upload
from ..threads import submit
from .comfy_fp8 import is_alone, is_quantized, other_layout, reaches_the_end, unpacked
from .comfy_specs import half_bytes, is_t5, kind_of

HASHERS = min(16, os.cpu_count() or 1)  # threads

_READABLE = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def sub_encoders(model: nn.Module) -> dict[str, Any]:
    """Path in `model` -> each text encoder ComfyUI runs through SDClipModel ("clip_l", "t5xxl")."""
    return {n: m for n, m in model.named_modules() if isinstance(m, comfy.sd1_clip.SDClipModel)}


def uses_projection(name: str, encoder: Any, names: set[str]) -> bool:
    """Whether this encoder's projected pooled vector is used, so that its projection counts.

    SDXL takes it from G alone, and its checkpoints hold none for L: ComfyUI leaves that one
    uninitialised, and what is different at each start must not enter a key.
    """
    if is_t5(encoder.transformer) or not encoder.options_default[2]:
        return False
    return not (name == "clip_l" and "clip_g" in names and "t5xxl" not in names)


class Source:
    """The live weights of one sub-encoder, as AcceleratedEncoder wants its host.

    Weights that ComfyUI holds in E4M3, with a scale (its quantized tensors) or without one (plain
    FP8), are `quantized`: engines get the codes and scales as they are. Holds no strong reference
    to the module: ComfyUI frees a model when its last user lets go.
    """

    def __init__(
        self,
        name: str,
        transformer: nn.Module,
        spec: EncoderSpec,
        projects: bool,
        device: torch.device,
    ) -> None:
        self.name, self.spec, self.device = name, spec, device
        self.prefix = f"{name}.transformer."
        self.shapes = spec.tensors()
        self._linears = frozenset(linear + ".weight" for linear in spec.linears())
        self._transformer = weakref.ref(transformer)
        self._patcher: Callable[[], Any] = lambda: None
        self.projection_shape: tuple[int, int] | None = None
        if projects:
            try:
                weight = self.read(PROJECTION)
            except OctavoError:
                return
            if bool(torch.isfinite(weight.float()).all()):  # a file without one leaves garbage
                self.projection_shape = (weight.shape[0], weight.shape[1])

    def fault(self) -> str:
        """Why these weights must not be quantized, in half a sentence; "" if they may."""
        kind, groups = kind_of(self.spec), self.spec.groups(0)
        first = (groups[0][0], groups[2][0])  # of the attention and of the feed-forward
        try:
            others = {layout for n in self.shapes if (layout := other_layout(self._raw(n)[0]))}
            if others:
                return (
                    f"a {kind} stored as {', '.join(sorted(others))}, which Octavo leaves to "
                    "ComfyUI"
                )
            held = {name: self.held(name) for name in self.shapes}
        except OctavoError as error:
            return f"not readable: {error}"
        weights = [held[linear + ".weight"] for linear in first]
        if all(fp8 is None or fp8.weight_scale is None for _, fp8 in weights) and all(
            reaches_the_end(weight) for weight, _ in weights
        ):
            return (
                f"a {kind} from an FP8 file whose scales ComfyUI's loader has dropped, so its "
                "pictures are wrong; load the 16-bit file"
            )
        return ""

    def look_through(self, patcher: Any) -> None:
        """Read from now on what lies under the patches of `patcher`."""
        self._patcher = weakref.ref(patcher)

    def read(self, name: str) -> Tensor:
        """The unpatched weight, in a dtype that holds it exactly; see `EncoderWeights.read`.

        From ComfyUI's backup where a patch lies over it. Raises OctavoError for a foreign form.
        """
        weight, fp8 = self.held(name)
        if fp8 is not None and name in self._linears:
            weight = weight.to(self.device)  # there it widens faster, and crosses the bus narrow
        return self.widened(name, weight, fp8)

    def widened(self, name: str, weight: Tensor, fp8: Fp8 | None) -> Tensor:
        """What `held` gives, or its copy on a device, as `read` gives it."""
        if weight.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            return weight
        if fp8 is not None and fp8.weight_scale is not None:
            return weight.float().mul_(fp8.weight_scale)
        return weight.float() if fp8 is not None and name in self._linears else weight.half()

    def stored(self, name: str) -> Tensor:
        """As `read`, but E4M3 codes as they are; with `scales` the whole content.

        Raises OctavoError for codes that have lost their scale: no weight of such an encoder is
        anywhere near 448, where FP8 codes end.
        """
        weight, fp8 = self.held(name)
        scaled = fp8 is not None and fp8.weight_scale is not None
        if name in self._linears and not scaled and reaches_the_end(weight):
            raise OctavoError(
                f"{self.name}: {name} reaches 448, as FP8 codes do whose scale was dropped when "
                "they were loaded; load the 16-bit file."
            )
        return weight

    @property
    def quantized(self) -> dict[str, QuantizedLinear]:
        """As `EncoderWeights.quantized`: canonical name (no `.weight`) -> codes and scales."""
        found = {}
        for linear, shape in self.spec.linears().items():
            fp8 = self.held(linear + ".weight")[1]
            if fp8 is not None:
                found[linear] = QuantizedLinear(shape, fp8, partial(self._codes, linear))
        return found

    @cached_property
    def is_fp8(self) -> bool:
        """Whether any linear is held in E4M3; no patch changes that."""
        return any(self.held(name)[1] is not None for name in self._linears)

    def pytorch_bytes(self) -> int:
        """What PyTorch keeps on a device for it, without the token table that stays in use."""
        in_fp8 = [n for n in self._linears if self.held(n)[1] is not None]
        return half_bytes(self.spec) - sum(torch.Size(self.shapes[n]).numel() for n in in_fp8)

    @property
    def scales(self) -> list[str]:
        """As `EncoderWeights.scales`: what belongs to FP8 weights beside their codes."""
        found = []
        for name in self.shapes:
            fp8 = self.held(name)[1]
            if fp8 is None or (fp8 == Fp8() and name not in self._linears):
                continue
            stem = name.removesuffix(".weight")
            found.append(stem + ".weight_scale")
            if fp8.input_scale is not None:
                found.append(stem + ".input_scale")
            if fp8.full_precision:
                found.append(stem + ".full_precision")
        return sorted(found)

    def side(self, name: str) -> tuple[str, Tensor]:
        """(name, FP32 []) of one of `scales`."""
        stem, _, part = name.rpartition(".")
        fp8 = self.held(stem + ".weight")[1]
        assert fp8 is not None
        value = {"weight_scale": fp8.weight_scale, "input_scale": fp8.input_scale}.get(part, 1.0)
        return name, torch.tensor(1.0 if value is None else value, dtype=torch.float32)

    def _codes(self, linear: str) -> Tensor:
        return self.held(linear + ".weight")[0].cpu()

    def _raw(self, name: str) -> tuple[Any, nn.Module]:
        """The unpatched weight as ComfyUI holds it, and the module it is in."""
        transformer, patcher = self._transformer(), self._patcher()
        if transformer is None:
            raise OctavoError(f"{self.name}: ComfyUI freed this text encoder; load it again.")
        weight, _, convert = comfy.model_patcher.get_key_weight(transformer, name)
        kept = None if patcher is None else patcher.backup.get(self.prefix + name)
        if kept is not None:
            weight = kept.weight
        if convert is not None and not is_quantized(weight):
            weight = convert(weight)
        return weight, transformer.get_submodule(name.rpartition(".")[0])

    def held(self, name: str) -> tuple[Tensor, Fp8 | None]:
        """The unpatched weight as it lies, and how it is E4M3; None if it is not."""
        weight, module = self._raw(name)
        fp8: Fp8 | None = None
        if is_quantized(weight) and not other_layout(weight):
            weight, fp8 = unpacked(weight, module, f"{self.name}: {name}")
        elif getattr(weight, "dtype", None) == torch.float8_e4m3fn:
            fp8 = Fp8()
        weight = weight.detach() if isinstance(weight, Tensor) else weight
        shape = self.shapes.get(name)
        if (
            type(weight) not in (Tensor, nn.Parameter)
            or weight.dtype not in _READABLE
            or weight.is_meta
            or (shape is not None and tuple(weight.shape) != shape)
            or not is_alone(module)
        ):
            raise OctavoError(
                f"{self.name}: {name} is held in a form that Octavo cannot read "
                f"({type(weight).__name__}, {getattr(weight, 'dtype', 'no dtype')}); "
                "load the encoder with one of ComfyUI's own loaders."
            )
        return weight, fp8

    def encode(self, embeds: Tensor, mask: Tensor | None) -> Any:
        raise NotImplementedError("ComfyUI's own forward is called by the seam")


def relevant_patches(source: Source, patcher: Any) -> dict[str, list[Any]]:
    """Canonical name -> the patches of `patcher` that an engine's weights depend on."""
    found: dict[str, list[Any]] = {}
    for key, patches in patcher.patches.items():
        name = key.removeprefix(source.prefix)
        # Embeddings come from ComfyUI with their patches in them, so the table is left out.
        if name in (key, source.spec.token_table) or name not in source.shapes:
            continue
        active = [p for p in patches if not (p[0] == 0 and p[2] == 1)]
        if active:
            found[name] = active
    return found


class PatchedWeights:
    """`read` with LoRA and merges applied in FP32 by ComfyUI's own code, each weight once.

    The weights and the patches' own tensors cross to the GPU together, ahead of the reads, as long
    as those come block by block; nothing is kept of what was read.
    """

    def __init__(self, source: Source, patcher: Any) -> None:
        self._source, self._patcher = source, patcher
        self._patches: dict[str, list[Any]] | None = None
        self._ahead: Iterator[tuple[str, Tensor, list[Any] | None]] = iter(())
        self._moved: dict[str, tuple[Tensor, list[Any] | None]] = {}
        self._to_come: set[str] = set()  # of what is moved ahead

    def __call__(self, name: str) -> Tensor:
        source, device = self._source, self._source.device
        if self._patches is None:
            self._patches = relevant_patches(source, self._patcher)
            order = by_block(source.spec)
            self._to_come = set(order)
            self._ahead = _moved(source, self._patches, order)
        base, patches = self._fetch(name)
        if patches is None:
            return base
        weight = base.to(device=device, dtype=torch.float32, copy=True)
        weight = cast(Tensor, comfy.lora.calculate_weight(patches, weight, source.prefix + name))
        # In 16 bit where ComfyUI itself would hold it so.
        return weight.to(base.dtype) if base.dtype.itemsize == 2 else weight

    def _fetch(self, name: str) -> tuple[Tensor, list[Any] | None]:
        """The unpatched weight and its patches, on the device; the token table where it is."""
        assert self._patches is not None
        while name in self._to_come:  # what was read before is read again, alone
            ahead = next(self._ahead)
            self._to_come.remove(ahead[0])
            self._moved[ahead[0]] = ahead[1:]
        if name in self._moved:
            return self._moved.pop(name)
        base = self._source.read(name)
        if name not in self._patches:
            table = self._source.spec.token_table
            return base if name == table else base.to(self._source.device), None
        return base, self._patches[name]


def _moved(
    source: Source, patches: Mapping[str, list[Any]], names: Sequence[str]
) -> Iterator[tuple[str, Tensor, list[Any] | None]]:
    """(name, weight, its patches or None), on the device."""
    tensors: list[Tensor] = []
    scales: list[Fp8 | None] = []
    for name in names:
        weight, fp8 = source.held(name)
        tensors.append(weight)
        scales.append(fp8)
        _find_tensors(patches.get(name), tensors)
    moved = upload(tensors, source.device)
    for name, fp8 in zip(names, scales, strict=True):
        weight = source.widened(name, next(moved), fp8)
        yield name, weight, _with_tensors(patches.get(name), moved)


@cache
def by_block(spec: EncoderSpec) -> tuple[str, ...]:
    """The tensors of `spec` without the token table, as the reference reads them: by block."""
    names = [name for name in spec.tensors() if name != spec.token_table]
    first = {spec.block(i): i + 1 for i in range(spec.layers)}
    last = len(first) + 1

    def place(name: str) -> int:
        if name == POSITIONS:
            return 0
        return next((n for prefix, n in first.items() if name.startswith(prefix)), last)

    return tuple(sorted(names, key=place))


def _find_tensors(value: Any, found: list[Tensor]) -> None:
    """The tensors of patches that lie in RAM, in order."""
    if isinstance(value, Tensor):
        if _is_moved(value):
            found.append(value)
    elif isinstance(value, list | tuple):
        for item in value:
            _find_tensors(item, found)
    elif isinstance(value, comfy.weight_adapter.WeightAdapterBase):
        _find_tensors(value.weights, found)


def _with_tensors(value: Any, moved: Iterator[Tensor]) -> Any:
    """The same patches over the tensors of `moved`, which are those that `_find_tensors` finds."""
    if isinstance(value, Tensor):
        return next(moved) if _is_moved(value) else value
    if isinstance(value, list):
        return [_with_tensors(item, moved) for item in value]
    if type(value) is tuple:
        return tuple([_with_tensors(item, moved) for item in value])
    if isinstance(value, tuple):
        return type(value)(*[_with_tensors(item, moved) for item in value])
    if isinstance(value, comfy.weight_adapter.WeightAdapterBase):
        changed = object.__new__(type(value))
        changed.__dict__.update(value.__dict__)
        changed.weights = _with_tensors(value.weights, moved)
        return changed
    return value


def _is_moved(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.dim() > 0 and tensor.is_cpu


def digest_of(patches: Mapping[str, list[Any]]) -> str:
    """A digest of what the patches do: their tensors' bytes, strengths and kinds."""
    facts: list[str] = []
    tensors: list[Tensor] = []
    for name in sorted(patches):
        facts.append(name)
        _collect(patches[name], facts, tensors)
    digest = hashlib.sha256("\n".join(facts).encode())
    # hashlib lets go of the interpreter's lock: some 100 MB of a LoRA take 20 ms.
    parts = [submit(_hasher(), _bytes_digest, share) for share in _shares(tensors, HASHERS)]
    for part in parts:
        digest.update(part.result())
    return digest.hexdigest()


@cache
def _hasher() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(HASHERS, "octavo-digest")


def _shares(tensors: list[Tensor], count: int) -> list[list[Tensor]]:
    """`tensors` in order, cut into at most `count` runs of about equal bytes."""
    wanted = sum(t.nbytes for t in tensors) / count
    shares: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if size >= wanted * len(shares):
            shares.append([])
        shares[-1].append(tensor)
        size += tensor.nbytes
    return shares


def _bytes_digest(tensors: list[Tensor]) -> bytes:
    digest = hashlib.sha256()
    for tensor in tensors:
        plain = tensor if tensor.is_cpu and tensor.is_contiguous() else tensor.cpu().contiguous()
        if size := plain.nbytes:
            digest.update((ctypes.c_ubyte * size).from_address(plain.data_ptr()))
    return digest.digest()


def _collect(value: Any, facts: list[str], tensors: list[Tensor]) -> None:
    """Everything in `value`: what identifies it into `facts`, its tensors beside them."""
    if type(value) in (Tensor, nn.Parameter):  # another kind may have no memory to look at
        facts.append(f"{value.dtype}{tuple(value.shape)}")
        tensors.append(value)
    elif value is None or isinstance(value, str | int | float | bool | bytes):
        facts.append(repr(value))
    elif isinstance(value, list | tuple | set):
        facts.append(f"{type(value).__name__}{len(value)}")
        for item in sorted(value, key=repr) if isinstance(value, set) else value:
            _collect(item, facts, tensors)
    elif isinstance(value, dict):
        _collect(sorted(value.items(), key=lambda item: repr(item[0])), facts, tensors)
    elif isinstance(value, comfy.weight_adapter.WeightAdapterBase):
        facts.append(type(value).__qualname__)
        _collect(value.weights, facts, tensors)
    elif callable(value) and hasattr(value, "__qualname__") and "<" not in value.__qualname__:
        facts.append(f"{value.__module__}.{value.__qualname__}")
    else:  # unknown: equal to nothing else, so never served from another set
        facts.append(uuid.uuid4().hex)
