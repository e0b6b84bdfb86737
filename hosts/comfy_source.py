# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""What a ComfyUI text model holds: CLIP encoders, their live weights, and those under patches."""

from __future__ import annotations

import hashlib
import uuid
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Literal, cast

import comfy.clip_model
import comfy.lora
import comfy.model_patcher
import comfy.sd1_clip
import comfy.weight_adapter
import torch
from torch import Tensor, nn

from ..encoders import ClipSpec
from ..encoders.clip import PROJECTION, TOKENS
from ..errors import OctavoError

_READABLE = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def sub_encoders(model: nn.Module) -> dict[str, Any]:
    """Path in `model` -> each text encoder ComfyUI runs through SDClipModel ("clip_l", "t5xxl")."""
    return {n: m for n, m in model.named_modules() if isinstance(m, comfy.sd1_clip.SDClipModel)}


def spec_of(transformer: Any) -> ClipSpec | str:
    """The spec of a CLIP text model, or why it is none, in half a sentence."""
    own = comfy.clip_model.CLIPTextModel
    inner: Any = getattr(transformer, "text_model", None)
    if (
        type(transformer).forward is not own.forward
        or type(inner) is not comfy.clip_model.CLIPTextModel_
    ):
        return f"a {type(transformer).__name__}, which Octavo does not accelerate yet"
    layers = inner.encoder.layers
    first = layers[0]
    kind = _activation(first.mlp.activation)
    if kind is None:
        return "a CLIP with an activation that Octavo does not know"
    norms = {layer.layer_norm1.eps for layer in layers} | {inner.final_layer_norm.eps}
    if len(norms) != 1:
        return "a CLIP whose layer norms differ in eps"
    tokens, positions = inner.embeddings.token_embedding, inner.embeddings.position_embedding
    return ClipSpec(
        layers=len(layers),
        width=tokens.weight.shape[1],
        feed_forward=first.mlp.fc1.weight.shape[0],
        heads=first.self_attn.heads,
        positions=positions.weight.shape[0],
        vocabulary=tokens.weight.shape[0],
        activation=kind,
        layer_norm_eps=norms.pop(),
    )


def _activation(function: Any) -> Literal["quick_gelu", "gelu"] | None:
    known = comfy.clip_model.ACTIVATIONS
    if function is known["quick_gelu"]:
        return "quick_gelu"
    return "gelu" if function is known["gelu"] else None


def uses_projection(name: str, encoder: Any, names: set[str]) -> bool:
    """Whether this encoder's projected pooled vector is used, so that its projection counts.

    SDXL takes it from G alone, and its checkpoints hold none for L: ComfyUI leaves that one
    uninitialised, and what is different at each start must not enter a key.
    """
    if not encoder.options_default[2]:
        return False
    return not (name == "clip_l" and "clip_g" in names and "t5xxl" not in names)


@cache
def half_bytes(spec: ClipSpec) -> int:
    """What PyTorch keeps for it in 16 bit, without the token table that stays in use."""
    sizes = (torch.Size(shape).numel() for name, shape in spec.tensors().items() if name != TOKENS)
    return 2 * sum(sizes)


class Source:
    """The live weights of one sub-encoder, as AcceleratedEncoder wants its host.

    Holds no strong reference to the module: ComfyUI frees a model when its last user lets go.
    """

    def __init__(
        self,
        name: str,
        transformer: nn.Module,
        spec: ClipSpec,
        projects: bool,
        device: torch.device,
    ) -> None:
        self.name, self.spec, self.device = name, spec, device
        self.prefix = f"{name}.transformer."
        self.shapes = spec.tensors()
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
        block = self.spec.block(0)
        try:
            largest = [
                float(self.read(block + name).abs().max())
                for name in ("self_attn.q_proj.weight", "mlp.fc1.weight")
            ]
        except OctavoError as error:
            return str(error)
        except RuntimeError:  # E4M3 has no abs on this device: then they are codes with no scale
            return "a CLIP in FP8, which ComfyUI holds without scales"
        if largest == [448.0, 448.0]:  # FP8 codes end there; a weight is far from it
            return (
                "a CLIP from an FP8 file whose scales ComfyUI's loader has dropped, so its "
                "pictures are wrong; load the 16-bit file"
            )
        return ""

    def look_through(self, patcher: Any) -> None:
        """Read from now on what lies under the patches of `patcher`."""
        self._patcher = weakref.ref(patcher)

    def read(self, name: str) -> Tensor:
        """The unpatched weight: from ComfyUI's backup where a patch lies over it, dequantized."""
        transformer, patcher = self._transformer(), self._patcher()
        if transformer is None:
            raise OctavoError(f"{self.name}: ComfyUI freed this text encoder; load it again.")
        weight, _, convert = comfy.model_patcher.get_key_weight(transformer, name)
        kept = None if patcher is None else patcher.backup.get(self.prefix + name)
        if kept is not None:
            weight = kept.weight
        if convert is not None:
            weight = convert(weight)
        weight = weight.detach() if isinstance(weight, Tensor) else weight
        shape = self.shapes.get(name)
        if (
            type(weight) not in (Tensor, nn.Parameter)
            or weight.dtype not in _READABLE
            or weight.is_meta
            or (shape is not None and tuple(weight.shape) != shape)
        ):
            raise OctavoError(
                f"{self.name}: {name} is held in a form that Octavo cannot read "
                f"({type(weight).__name__}, {getattr(weight, 'dtype', 'no dtype')}); "
                "load the encoder with one of ComfyUI's own loaders."
            )
        return weight

    def encode(self, embeds: Tensor, mask: Tensor | None) -> Any:
        raise NotImplementedError("ComfyUI's own forward is called by the seam")


def relevant_patches(source: Source, patcher: Any) -> dict[str, list[Any]]:
    """Canonical name -> the patches of `patcher` that an engine's weights depend on."""
    found: dict[str, list[Any]] = {}
    for key, patches in patcher.patches.items():
        name = key.removeprefix(source.prefix)
        # Embeddings come from ComfyUI with their patches in them, so the table is left out.
        if name in (key, TOKENS) or name not in source.shapes:
            continue
        active = [p for p in patches if not (p[0] == 0 and p[2] == 1)]
        if active:
            found[name] = active
    return found


class PatchedWeights:
    """`read` with LoRA and merges applied in FP32 by ComfyUI's own code; each is made once."""

    def __init__(self, source: Source, patcher: Any) -> None:
        self._source, self._patcher = source, patcher
        self._patches: dict[str, list[Any]] | None = None
        self._made: dict[str, Tensor] = {}

    def __call__(self, name: str) -> Tensor:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Tensor:
        base, device = self._source.read(name), self._source.device
        if self._patches is None:
            self._patches = relevant_patches(self._source, self._patcher)
        if name not in self._patches:
            return base if name == TOKENS else base.to(device)
        weight = base.to(device=device, dtype=torch.float32, copy=True)
        key = self._source.prefix + name
        weight = cast(Tensor, comfy.lora.calculate_weight(self._patches[name], weight, key))
        # Held in 16 bit where ComfyUI itself would hold it so: two passes read each weight.
        return weight.to(base.dtype) if base.dtype.itemsize == 2 else weight


def digest_of(patches: Mapping[str, list[Any]]) -> str:
    """A digest of what the patches do: their tensors' bytes, strengths and kinds."""

    def one(name: str) -> bytes:
        digest = hashlib.sha256(name.encode())
        _feed(digest, patches[name])
        return digest.digest()

    # hashlib lets go of the interpreter's lock: a LoRA of 100 MB takes some 20 ms.
    with ThreadPoolExecutor(8) as threads:
        parts = list(threads.map(one, sorted(patches)))
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        digest.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    elif value is None or isinstance(value, str | int | float | bool | bytes):
        digest.update(repr(value).encode() + b";")
    elif isinstance(value, list | tuple | set):
        items = sorted(value, key=repr) if isinstance(value, set) else value
        digest.update(f"{type(value).__name__}{len(value)}(".encode())
        for item in items:
            _feed(digest, item)
    elif isinstance(value, dict):
        _feed(digest, sorted(value.items(), key=lambda item: repr(item[0])))
    elif isinstance(value, comfy.weight_adapter.WeightAdapterBase):
        digest.update(type(value).__qualname__.encode())
        _feed(digest, value.weights)
    elif callable(value) and hasattr(value, "__qualname__") and "<" not in value.__qualname__:
        digest.update(f"{value.__module__}.{value.__qualname__}".encode())
    else:  # unknown: equal to nothing else, so never served from another set
        digest.update(uuid.uuid4().bytes)
