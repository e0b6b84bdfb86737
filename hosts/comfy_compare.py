# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""What the smaller nodes do with a served CLIP: compare it, save it, show the environment."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.model_management as management
import torch
from torch import Tensor

from ..checkpoints.quantized import QuantizedCheckpoint
from ..compile import similarity_of
from ..encoders.clip import PROJECTION
from ..errors import FileError, OctavoError
from ..recipes import Recipe, load_recipe, shortfall
from .comfy import Served, Service, cache, service_of, without
from .comfy_source import Source
from .comfy_specs import reads_scales


@dataclass(frozen=True)
class Compared:
    """One prompt through both: cosines of `tokens`, their mean and minimum, of pooled; medians."""

    prompt: str
    tokens: tuple[float, ...]
    pooled: float | None
    pytorch_ms: float
    octavo_ms: float

    @property
    def token_mean(self) -> float:
        return sum(self.tokens) / len(self.tokens)

    @property
    def token_min(self) -> float:
        return min(self.tokens)


@dataclass(frozen=True)
class Comparison:
    rows: tuple[Compared, ...]
    notes: tuple[str, ...]

    def text(self) -> str:
        """The tables as plain text."""
        lines = ["token mean  token min  pooled   PyTorch    Octavo  faster  prompt"]
        for row in self.rows:
            pooled = "-" if row.pooled is None else f"{row.pooled:.4f}"
            faster = row.pytorch_ms / row.octavo_ms if row.octavo_ms else float("nan")
            lines.append(
                f"{row.token_mean:10.5f} {row.token_min:10.5f} {pooled:>7} "
                f"{row.pytorch_ms:7.2f} ms {row.octavo_ms:6.2f} ms {faster:6.1f}x  {row.prompt}"
            )
        return "\n".join([*lines, "", *self.notes])


def compare(clip: Any, prompts: list[str], repeats: int) -> Comparison:
    """Each prompt through ComfyUI's PyTorch and through `clip`; raises OctavoError without ours."""
    service = service_of(clip)
    if service is None:
        raise OctavoError(
            "this CLIP is not served by Octavo; connect it through 'FP8 Text Encoder' first."
        )
    plain = _encode_all(without(clip), prompts, repeats)
    ours = _encode_all(clip, prompts, repeats)
    rows = []
    for prompt, (expected, expected_pooled, slow), (got, pooled, fast) in zip(
        prompts, plain, ours, strict=True
    ):
        cosines = _cosines(expected.flatten(0, -2), got.flatten(0, -2))
        same = None
        if pooled is not None and expected_pooled is not None:
            same = _cosines(expected_pooled, pooled)[0]
        rows.append(Compared(prompt, tuple(cosines), same, slow, fast))
    slow, fast = (sum(getattr(r, name) for r in rows) for name in ("pytorch_ms", "octavo_ms"))
    service.speed_up = slow / fast if fast else None
    service.show()
    notes = [served.report().text() for served in service.served.values()]
    notes += [
        f"{s.name}: answered by PyTorch: {s.why_host}"
        for s in service.served.values()
        if s.why_host
    ]
    notes += [f"{name}: PyTorch; it is {what}" for name, what in service.unknown.items()]
    return Comparison(tuple(rows), tuple(notes))


def _encode_all(
    clip: Any, prompts: list[str], repeats: int
) -> list[tuple[Tensor, Tensor | None, float]]:
    """(conditioning, pooled, median milliseconds) of each prompt, after one encode to warm up."""
    results = []
    for prompt in prompts:
        tokens = clip.tokenize(prompt)
        clip.encode_from_tokens(tokens, return_pooled=True)
        times = []
        for _ in range(repeats):
            management.throw_exception_if_processing_interrupted()
            _wait(clip.patcher.load_device)
            start = time.perf_counter()
            cond, pooled = clip.encode_from_tokens(tokens, return_pooled=True)
            _wait(clip.patcher.load_device)
            times.append((time.perf_counter() - start) * 1e3)
        results.append((cond, pooled, sorted(times)[len(times) // 2]))
    return results


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cosines(a: Tensor, b: Tensor) -> list[float]:
    """Cosines of rows; two zero rows are equal (padding, zeroed states)."""
    a, b = a.double().cpu(), b.double().cpu()
    cosine = torch.nn.functional.cosine_similarity(a, b, dim=-1)
    both_zero = (a.abs().sum(-1) == 0) & (b.abs().sum(-1) == 0)
    return [float(c) for c in torch.where(both_zero, 1.0, cosine)]


def environment(verify: bool = False) -> str:
    """What `octavo doctor` shows, for this process, with ComfyUI's cache folder."""
    from ..doctor import cache_facts, examine, text

    found = {**examine(), "cache": cache_facts(cache)}
    lines = [text(found)]
    if "problem" in found["cache"]:
        return lines[0]
    store = cache()
    entries = store.entries()
    for entry in entries:
        lines.append(
            f"  {entry.manifest.kind:10} {entry.manifest.key}  {entry.manifest.length / 1e6:.1f} MB"
        )
    if verify:
        faults = [c for c in store.verify_all() if c.fault]
        lines.append(f"  checked: {len(entries)} entries, {len(faults)} faults")
        lines += [f"  {c.kind} {c.key}: {c.fault}" for c in faults]
    return "\n".join(lines)


def save(clip: Any, name: str) -> list[Path]:
    """Write each accelerated encoder of `clip` with its FP8 values, patches included.

    A T5-XXL in FP8, with its scales, as ComfyUI 0.33 reads them. All else in 16 bit: its loaders of
    CLIP would take the codes for weights, without a word. So the values are written as they are
    after quantization; every ComfyUI loads them, and Octavo gets the same codes from them again.
    The recipe is the one that serves. The files go into the first text_encoders folder, under
    `name` and never over another. Raises OctavoError, also where the values are not close enough.
    """
    import folder_paths

    from ..checkpoints.quantized import open_quantized
    from ..checkpoints.writing import whole_file, write_safetensors
    from ..compile import fingerprint_of, make_checkpoint

    service = service_of(clip)
    if service is None or not service.served:
        raise OctavoError(
            "this CLIP is not served by Octavo; connect it through 'FP8 Text Encoder' first."
        )
    folder = Path(folder_paths.get_folder_paths("text_encoders")[0])
    written = []
    for served in service.served.values():
        source, recipe = served.source, _serving(service, served)
        source.look_through(clip.patcher)
        with torch.inference_mode(False), torch.no_grad():
            patched = served.patched(clip.patcher)
            weights: Any = source if patched is None else _As(source, patched.read)
            entry, _ = make_checkpoint(
                weights,
                fingerprint_of(weights, service.progress()),
                recipe,
                cache(),
                service.progress(),
                device=source.device,
            )
            quantized = open_quantized(entry.path, entry.identity)
            _judge(service, served, weights.read, recipe, quantized)
        names = [*source.shapes, *([PROJECTION] if source.projection_shape else [])]
        target = _free_name(folder, name, f"{served.name}_{recipe.name}")
        with whole_file(target, "free some space or choose another name") as file:
            if reads_scales(source.spec):
                tensors = _in_fp8(quantized, names)
            else:
                tensors = {n: _half(quantized.dense(n)) for n in names}
            # Not under "octavo", which names the checkpoints that `octavo build` writes.
            note = {"format": "pt", "values": f"Octavo, recipe {recipe.name}"}
            write_safetensors(file, tensors, note)
        written.append(target)
    return written


def _serving(service: Service, served: Served) -> Recipe:
    """The recipe of the engine that serves, or the one that is to be tried first."""
    if not served.prepared:
        return load_recipe(service.settings.recipe)
    report = served.report()
    if report.recipe is None:
        reason = report.refusals[-1].reason if report.refusals else "no engine can serve here"
        raise OctavoError(f"{served.name}: PyTorch serves it ({reason}), so there is no FP8 of it.")
    return load_recipe(report.recipe)


def _judge(
    service: Service,
    served: Served,
    read: Callable[[str], Tensor],
    recipe: Recipe,
    quantized: QuantizedCheckpoint,
) -> None:
    """Raise OctavoError where the quantized values fall short on the check prompts.

    The weights that `read` gives may be those of a LoRA that no prompt has asked for yet.
    """
    spec, recipe = served.source.spec, recipe.of(served.source.spec)
    held_out, expected, _ = served.accelerated.expect(read)
    found, _ = similarity_of(
        spec, quantized.structure, recipe.body, quantized.read, held_out, expected,
        device=served.source.device,
    )  # fmt: skip
    short = shortfall(found.facts(), service.settings.floors(spec) or recipe.floor)
    if short is not None:
        raise OctavoError(
            f"{served.name}: with {recipe.name} it is not close enough to FP32 ({short}); choose "
            "another precision on 'FP8 Text Encoder', or a smaller strength of its LoRA."
        )


def _in_fp8(quantized: QuantizedCheckpoint, names: list[str]) -> dict[str, Tensor]:
    """The checkpoint's tensors as they are, with the notes by which ComfyUI knows the FP8 ones."""
    tensors = {name: quantized.read(name) for name in names}
    note = torch.frombuffer(bytearray(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8)
    for linear, precision in quantized.structure.items():
        if precision == "fp8":
            for scale in (linear + ".weight_scale", linear + ".input_scale"):
                tensors[scale] = quantized.read(scale)
            tensors[linear + ".comfy_quant"] = note.clone()
    return tensors


def _half(values: Tensor) -> Tensor:
    """In float16, or as they are where that cannot hold them."""
    half = values.to(torch.float16)
    return half if bool(torch.isfinite(half).all()) else values


class _As:
    """A source under other weights."""

    def __init__(self, source: Source, read: Callable[[str], Tensor]) -> None:
        self.name, self.spec, self.device = source.name, source.spec, source.device
        self.projection_shape, self.read = source.projection_shape, read


def _free_name(folder: Path, name: str, what: str) -> Path:
    stem = "".join(c if c.isalnum() or c in "-_. " else "_" for c in name).strip(" .") or "octavo"
    for count in range(1, 10_000):
        number = f"_{count:02d}" if count > 1 else ""
        path = folder / f"{stem[:80]}_{what}{number}.safetensors"
        if not path.exists():
            return path
    raise FileError(folder, f"holds too many files called {stem}", "choose another name")
