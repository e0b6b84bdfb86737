# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""From a model file to cached checkpoints and plans.

Recognise, calibrate, quantize, verify against FP32, emit ONNX, compile, store.
Everything heavy is imported where it is used: a build that the cache can serve imports no torch.
Progress comes as `Progress` events; the callback may raise to cancel, and nothing partial is left.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Protocol

from . import prompts
from .backends.onnx_ops import PROGRAM_VERSION, Body, Graph, emit
from .checkpoints import (
    Detected,
    EncoderWeights,
    FileIdentity,
    Fingerprint,
    Memo,
    detect,
    fingerprint,
    open_weights,
)
from .checkpoints.quantized import (
    SCHEMA,
    QuantizedCheckpoint,
    QuantizedTensors,
    Structure,
    check_scales,
    metadata,
    open_quantized,
)
from .checkpoints.writing import refuse_unwritable, whole_file, write_safetensors
from .device import Device, peak_rss_bytes, trim_memory
from .encoders import EncoderSpec, T5Spec
from .encoders.t5 import LONGEST
from .engine_cache import CheckpointKey, EngineCache, Entry, PlanKey, digest
from .errors import (
    BuildError,
    CacheError,
    EngineUnavailable,
    FileError,
    OctavoError,
    QuantizationError,
    SimilarityError,
)
from .recipes import Recipe
from .trt import Flavour, Installed, Missing, installed
from .trt.build import BuildRequest, build_plan
from .trt.gpus import Gpu

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .calibrate import Calibration
    from .checkpoints.scales import QuantizedLinear
    from .verify import Run, Similarity, States

log = logging.getLogger(__name__)

HELD_OUT_PROMPTS = 16  # for the similarity noted with each checkpoint; `verify` takes all
BATCH = 16
STREAMED_BATCH = 64  # 64 x 77 tokens through the widest layer of CLIP-G take 0.1 GB in FP32
BATCHES = (1, 2, 16)  # min, opt, max of a plan; larger batches are split by the caller
T5_BATCHES = (1, 1, 4)
T5_LENGTHS = (1, 256, LONGEST)
T5_SAMPLE = 77  # tokens of a held-out prompt: what SD3 pads to
T5_CALIBRATION_BATCH = 8
NOT_CALIBRATED = "none"
OUTPUT_ELSEWHERE = "give --output another place"
OUTPUT_REMEDY = f"free some space or {OUTPUT_ELSEWHERE}"


@dataclass(frozen=True)
class Progress:
    """One step of a long job: `done` of `total` (0 = unknown) of a `phase` for `subject`."""

    subject: str
    phase: str
    done: int = 0
    total: int = 0


Report = Callable[[Progress], None]


def silent(_: Progress) -> None:
    """The `Report` of a caller that wants none."""


class Source(Protocol):
    """Where canonical weights come from: an encoder in a file, or a host's live module.

    One whose weights are FP8 has `quantized`, `stored`, `scales` and `side` besides, as
    `EncoderWeights` has them.
    """

    @property
    def name(self) -> str: ...
    @property
    def spec(self) -> EncoderSpec: ...
    @property
    def projection_shape(self) -> tuple[int, int] | None: ...
    def read(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class Target:
    """One plan to build: `gpu` is the name it was asked by, `sms` what it must run on."""

    gpu: str
    sms: tuple[int, ...]


def targets_of(gpus: Iterable[Gpu], *, portable: bool) -> list[Target]:
    """One target per name, or one for all of them."""
    distinct = list(dict.fromkeys(gpus))
    if portable:
        names = "+".join(g.name for g in distinct)
        return [Target(names, tuple(sorted({g.sm for g in distinct})))]
    return [Target(g.name, (g.sm,)) for g in distinct]


@dataclass(frozen=True)
class Engine:
    """A plan in the cache, as `build --json` shows it. `seconds` is what this run took for it."""

    gpu: str
    sms: tuple[int, ...]
    flavour: str
    version: str
    weights: Literal["shared", "embedded"]
    key: str
    path: str
    bytes: int
    seconds: float
    cached: bool


@dataclass(frozen=True)
class Built:
    """One encoder of a file with its checkpoint and engines."""

    encoder: EncoderWeights
    fingerprint: Fingerprint
    checkpoint: Entry
    checkpoint_cached: bool
    similarity: dict[str, Any]
    engines: tuple[Engine, ...]
    noted: bool = False  # the similarity was measured when Octavo wrote the file, not now

    def facts(self) -> dict[str, Any]:
        spec = self.encoder.spec
        shown = ("token_mean", "token_min", "pooled")
        return {
            "name": self.encoder.name,
            "family": spec.family,
            "layers": spec.layers,
            "width": spec.width,
            "positions": spec.longest,
            "key": encoder_key(spec, self.fingerprint),
            "checkpoint": {
                "key": self.checkpoint.manifest.key,
                "path": str(self.checkpoint.path),
                "bytes": self.checkpoint.manifest.length,
            },
            "engines": [asdict(engine) for engine in self.engines],
            "similarity": {name: self.similarity.get(name) for name in shown},
        }


@dataclass
class BuildResult:
    file: str
    recipe: str
    encoders: list[Built] = field(default_factory=list)
    unsupported: tuple[str, ...] = ()
    peak_rss_bytes: int = 0
    seconds: float = 0.0

    def facts(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "recipe": self.recipe,
            "encoders": [built.facts() for built in self.encoders],
            "peak_rss_bytes": self.peak_rss_bytes,
            "seconds": round(self.seconds, 3),
        }


def encoder_key(spec: EncoderSpec, content: Fingerprint) -> str:
    """The key of an encoder as found: its spec and its values; the projection is hashed apart."""
    return digest({"spec": spec.facts(), "body": content.body})


def select(detected: Detected, names: Sequence[str]) -> list[EncoderWeights]:
    """All encoders of a file, or those called `names` (by name or family)."""
    if not names:
        return list(detected.encoders)
    chosen = []
    for name in dict.fromkeys(names):
        found = [e for e in detected.encoders if name in (e.name, e.spec.family)]
        if not found:
            has = ", ".join(e.name for e in detected.encoders)
            raise FileError(detected.file.path, f"has no encoder '{name}'", f"it has {has}")
        chosen += [e for e in found if e not in chosen]
    return chosen


def content_of(
    encoder: EncoderWeights, detected: Detected, cache: EngineCache, report: Report = silent
) -> Fingerprint:
    """The encoder's fingerprint, from the cache's memo while the file has not changed."""
    memo = Memo(cache.root)
    if (known := memo.get(detected.file, encoder)) is not None:
        return known
    found = fingerprint(
        encoder, lambda done, total: report(Progress(encoder.name, "reading", done, total))
    )
    memo.put(detected.file, encoder, found)
    return found


def fingerprint_of(source: Source, report: Report = silent) -> Fingerprint:
    """The same digests as `checkpoints.fingerprint` gives for the file the weights came from."""
    return fingerprint(
        _Live(source),
        lambda done, total: report(Progress(source.name, "reading", done, total)),
    )


class _Live:
    """Live weights as `checkpoints.fingerprint` wants them, on whatever device they lie."""

    def __init__(self, source: Source) -> None:
        self.spec, self.projection_shape, self.label = (
            source.spec,
            source.projection_shape,
            source.name,
        )
        self._source: Any = source
        self._in_codes = hasattr(source, "stored")  # as Source.quantized says
        self.scales: Sequence[str] = getattr(source, "scales", ()) if self._in_codes else ()

    def check(self) -> None:
        """Memory that is held does not go."""

    def stored(self, name: str) -> Tensor:
        import torch

        found: Tensor = (self._source.stored if self._in_codes else self._source.read)(name)
        if found.dtype == torch.float8_e4m3fn and not self._in_codes:
            found = found.half()  # values, which are what such a source has
        return found.detach()

    def side(self, name: str) -> tuple[str, Tensor]:
        if not self._in_codes:
            raise KeyError(name)
        found: tuple[str, Tensor] = self._source.side(name)
        return found

    def sources(self, name: str) -> tuple[str, ...]:
        return (name,)


def batches_of(spec: EncoderSpec) -> tuple[int, int, int]:
    """Smallest, usual and largest batch of a plan of `spec`."""
    return T5_BATCHES if isinstance(spec, T5Spec) else BATCHES


def lengths_of(spec: EncoderSpec) -> tuple[int, int, int] | None:
    """The same of the number of tokens, where it is dynamic; else None."""
    return T5_LENGTHS if isinstance(spec, T5Spec) else None


def tokenizer_of(spec: EncoderSpec) -> prompts.Tokenizer:
    return "t5" if isinstance(spec, T5Spec) else "clip"


def checkpoint_key(spec: EncoderSpec, content: Fingerprint, recipe: Recipe) -> CheckpointKey:
    recipe = recipe.of(spec)
    calibration = "none"
    if recipe.calibrated:
        calibration = f"{prompts.set_id('calibration', tokenizer_of(spec))}:{recipe.prompts}"
    return CheckpointKey(
        spec.facts(), content.body, content.projection, recipe.digest(), calibration, SCHEMA
    )


def plan_key(
    spec: EncoderSpec,
    structure: Structure,
    body: Body,
    sms: tuple[int, ...],
    *,
    flavour: Flavour = "tensorrt_rtx",
    mask: bool = False,
    checkpoint: str | None = None,
) -> PlanKey:
    """The key of a plan under the TensorRT that is installed; raises `EngineUnavailable`.

    `mask` as for `make_plan`.
    """
    package = _package(flavour)
    gpu = driver = None
    if flavour == "tensorrt":  # its plans serve the very GPU and driver they were built on
        device = _local_gpu()
        assert device.sm is not None
        gpu, driver, sms = device.name, device.driver or "unknown", (device.sm,)
    return PlanKey(
        flavour=flavour,
        version=package.version,
        cuda=package.cuda or "unknown",
        sms=sms,
        profile=_profile_facts(spec, mask),
        program=PROGRAM_VERSION,
        # All but the vocabulary may change the graph.
        architecture={k: v for k, v in spec.facts().items() if k != "vocabulary"},
        structure={"linears": dict(structure), "body": body},
        weights="shared" if checkpoint is None else "embedded",
        checkpoint=checkpoint,
        gpu=gpu,
        driver=driver,
    )


def has_mask(spec: EncoderSpec, mask: bool) -> bool:
    """Whether a plan takes a mask: if asked for, and T5's always, since half of its hosts use one.

    So a plan that was built ahead is the one that is looked for at run time.
    """
    return mask or isinstance(spec, T5Spec)


def _profile_facts(spec: EncoderSpec, mask: bool) -> dict[str, object]:
    facts: dict[str, object] = {"batch": list(batches_of(spec)), "mask": has_mask(spec, mask)}
    if isinstance(spec, T5Spec):
        return {**facts, "tokens": list(T5_LENGTHS)}
    return {**facts, "positions": spec.positions}


def _package(flavour: Flavour) -> Installed:
    package = installed(flavour)
    if isinstance(package, Missing):
        raise EngineUnavailable(flavour, package.reason, package.remedy)
    return package


def _check_writer(flavour: Flavour) -> None:
    if importlib.util.find_spec("onnx") is None:
        raise EngineUnavailable(
            flavour, "the package 'onnx', which writes the graph, is missing", "pip install onnx"
        )


def _local_gpu() -> Device:
    from .device import probe

    device = probe()
    if device.sm is None:
        raise EngineUnavailable(
            "tensorrt", "it builds on the GPU it builds for and there is none here",
            "use tensorrt_rtx, or run the build on that machine",
        )  # fmt: skip
    return device


def build(
    path: str | os.PathLike[str],
    gpus: Sequence[Gpu],
    *,
    recipe: Recipe,
    cache: EngineCache | None = None,
    portable: bool = False,
    embed_weights: bool = False,
    encoders: Sequence[str] = (),
    output: Path | None = None,
    activation: str | None = None,
    flavour: Flavour = "tensorrt_rtx",
    mask: bool = False,
    report: Report = silent,
) -> BuildResult:
    """Build everything `path` needs on `gpus`, or find it in the cache.

    `output` receives a copy of the FP8 checkpoint. Raises `OctavoError` for bad input or
    environment, as far as it can before the long work, and `SimilarityError` when a checkpoint is
    under its recipe's floor: then no plan is built from it.
    """
    start = time.monotonic()
    cache = cache or EngineCache()
    _check_calibration(recipe)
    _package(flavour)
    if flavour == "tensorrt":
        _local_gpu()
    detected = detect(path, activation=activation)
    chosen = select(detected, encoders)
    if output is not None:
        _check_output(output, detected, chosen)
    result = BuildResult(str(detected.file.path), recipe.name, unsupported=detected.unsupported)
    for encoder in chosen:
        content = content_of(encoder, detected, cache, report)
        checkpoint, cached = checkpoint_of(
            encoder, detected, content, recipe, cache, report, ready=partial(_check_writer, flavour)
        )
        quantized = open_quantized(checkpoint.path, checkpoint.identity)
        # Of the file itself, whose checksum was verified; the manifest's facts have none.
        similarity = _noted_similarity(quantized)
        result.recipe = str(quantized.facts.get("recipe", recipe.name))
        _check_floor(encoder.name, similarity, recipe.of(encoder.spec))
        if output is not None:
            copy_file(checkpoint.path, output)
        engines = [
            make_plan(
                encoder.name, quantized, checkpoint.manifest.key, target, cache,
                body=_body_of(quantized), flavour=flavour, embed=embed_weights, mask=mask,
                report=report,
            )
            for target in targets_of(gpus, portable=portable)
        ]  # fmt: skip
        built = Built(
            encoder, content, checkpoint, cached, similarity, tuple(e for e, _ in engines),
            detected.is_octavo,
        )  # fmt: skip
        result.encoders.append(built)
        result.peak_rss_bytes = max([result.peak_rss_bytes, *(peak for _, peak in engines)])
    result.peak_rss_bytes = max(result.peak_rss_bytes, peak_rss_bytes())
    result.seconds = time.monotonic() - start
    return result


def _check_calibration(recipe: Recipe) -> None:
    """Raise OctavoError before the long work for what `recipe` cannot be calibrated with."""
    if recipe.algorithm != "max":  # what is asked then imports torch, which a cached build does not
        from .calibrate import check_algorithm

        check_algorithm(recipe)
    shipped = len(prompts.load_tokens("calibration"))
    if recipe.prompts > shipped:
        raise OctavoError(
            f"--prompts {recipe.prompts} is more than the {shipped} calibration prompts there are."
        )


def _check_output(output: Path, detected: Detected, chosen: Sequence[EncoderWeights]) -> None:
    path = detected.file.path
    if len(chosen) != 1:
        names = ", ".join(e.name for e in chosen)
        raise FileError(
            path, f"holds {len(chosen)} encoders ({names}) for one output file",
            "name one with --encoder",
        )  # fmt: skip
    refuse_unwritable(output, OUTPUT_ELSEWHERE)
    if any(os.path.realpath(output) == identity.path for identity in detected.file.identities):
        raise FileError(output, "is the model itself", "give --output the name of another file")
    if output.is_file() and not _is_checkpoint(output):
        raise FileError(
            output, "is there already and is no checkpoint of Octavo's",
            "give --output the name of another file",
        )  # fmt: skip
    if output.suffix.lower() != ".safetensors":
        raise FileError(
            output, "is the place of a safetensors file, which programs know by its name",
            "give --output a name that ends in .safetensors",
        )  # fmt: skip


def _is_checkpoint(path: Path) -> bool:
    """Whether `path` may be written over: empty, or a checkpoint that a build wrote."""
    try:
        with path.open("rb") as file:
            empty = not file.read(1)
        if empty:
            return True
        with open_weights(path) as held:
            return "octavo" in held.metadata
    except (OSError, OctavoError):
        return False


def _body_of(checkpoint: QuantizedCheckpoint) -> Body:
    body: Body = checkpoint.facts["body"]
    return body


def _noted_similarity(checkpoint: QuantizedCheckpoint) -> dict[str, Any]:
    """What was measured when the checkpoint was made; nothing where its note is not sound."""
    found = checkpoint.facts.get("similarity")
    cosines = ("token_mean", "token_min", "pooled")
    if not isinstance(found, dict) or not all(
        isinstance(found.get(name), float | int | None) for name in cosines
    ):
        return {}
    return found


def _check_floor(name: str, similarity: dict[str, Any], recipe: Recipe) -> None:
    from .recipes import shortfall

    short = shortfall(similarity, recipe.floor)
    if short is not None:
        hint = f"try --recipe {recipe.demote_to}" if recipe.demote_to else "use PyTorch for it"
        raise SimilarityError(f"{name} with recipe {recipe.name}: {short}; {hint}.")


# Checkpoints


def make_checkpoint(
    source: Source,
    content: Fingerprint,
    recipe: Recipe,
    cache: EngineCache,
    report: Report = silent,
    *,
    device: torch.device | str = "cpu",
    recheck: Callable[[], Fingerprint] | None = None,
    ready: Callable[[], None] | None = None,
) -> tuple[Entry, bool]:
    """(the FP8 checkpoint's cache entry, whether it was there already).

    `ready` is called before the long work, and raises where it would be for nothing.

    `recheck` tells the content again before anything is stored (None: it is hashed again): weights
    that changed meanwhile must not lie under the key of what they were.

    On a GPU `device` the reference streams through it one weight at a time and the FP8 tensor cores
    judge; on the CPU, ModelOpt calibrates where it is installed and ONNX Runtime judges the graph.
    """
    recipe = recipe.of(source.spec)
    key = checkpoint_key(source.spec, content, recipe)
    if (entry := cache.get("checkpoint", key)) is not None:
        return entry, True
    with cache.lock(key, on_wait=_waiting(source.name, report)):
        if (entry := cache.get("checkpoint", key)) is not None:
            return entry, True
        if ready is not None:
            ready()
        with cache.temporary("checkpoint", key) as probe:
            probe.touch()  # a cache that cannot be written shall say so now, not in a minute
            _refuse_full(probe, source.spec, recipe, cache.places.disk)
        tensors, facts = _quantize(source, content, recipe, report, device)
        report(Progress(source.name, "writing the FP8 checkpoint"))

        def refuse_changed() -> None:
            if (recheck() if recheck else fingerprint_of(source)) != content:
                raise FileError(source.name, "changed while it was being quantized", "start again")

        entry = _store(cache, key, tensors, facts, refuse_changed)
        del tensors
        trim_memory()
        return entry, False


def _refuse_full(place: Path, spec: EncoderSpec, recipe: Recipe, another_disk: str) -> None:
    """Raise where the checkpoint surely finds no room; of a T5 it is written after minutes."""
    fp8 = {n for n, kind in recipe.structure(spec.linears()).items() if kind == "fp8"}
    needed = sum(
        math.prod(shape) * (1 if name.removesuffix(".weight") in fp8 else 2)
        for name, shape in spec.tensors().items()
    )
    free = shutil.disk_usage(place.parent).free
    if free < needed:
        raise CacheError(
            place.parent,
            f"the disk is full: {free / 1e6:.1f} of the {needed / 1e6:.1f} MB needed are left",
            f"free some space, or {another_disk}",
        )


def checkpoint_of(
    encoder: EncoderWeights,
    detected: Detected,
    content: Fingerprint,
    recipe: Recipe,
    cache: EngineCache,
    report: Report = silent,
    *,
    ready: Callable[[], None] | None = None,
) -> tuple[Entry, bool]:
    """As `make_checkpoint`; a file that Octavo wrote is its own checkpoint."""
    if detected.is_octavo:
        return _import_quantized(encoder, detected, content, cache, report)

    def recheck() -> Fingerprint:
        return content if is_unchanged(detected) else fingerprint(encoder)

    return make_checkpoint(encoder, content, recipe, cache, report, recheck=recheck, ready=ready)


def is_unchanged(detected: Detected) -> bool:
    """Whether the files are still those that were recognised (as the memo asks)."""
    try:
        return all(FileIdentity.of(i.path) == i for i in detected.file.identities)
    except OSError:
        return False


def _steps(subject: str, report: Report) -> Callable[[str], Callable[[int, int], None]]:
    """phase -> the `progress(done, total)` that reports it."""

    def of(phase: str) -> Callable[[int, int], None]:
        return lambda done, total: report(Progress(subject, phase, done, total))

    return of


def _waiting(subject: str, report: Report) -> Callable[[float], None]:
    return lambda waited: report(Progress(subject, "waiting for another process", int(waited)))


def _store(
    cache: EngineCache,
    key: CheckpointKey,
    tensors: QuantizedTensors,
    facts: dict[str, Any],
    refuse_changed: Callable[[], None],
) -> Entry:
    def write(file: BinaryIO) -> None:
        write_safetensors(file, tensors, metadata(facts), tensors.type)
        refuse_changed()  # only now: T5's tensors are read once more as they are written

    return cache.put("checkpoint", key, write, facts)


def _import_quantized(
    encoder: EncoderWeights,
    detected: Detected,
    content: Fingerprint,
    cache: EngineCache,
    report: Report,
) -> tuple[Entry, bool]:
    """A file Octavo wrote is its own checkpoint; it enters the cache under its content."""
    source = open_quantized(detected.file.path)
    if encoder.spec != source.spec:
        raise FileError(
            source.path, "was quantized for another activation than the one asked for",
            "leave --activation out, or build from the original file",
        )  # fmt: skip
    check_scales(source)
    # What its metadata says shapes the graph and the verdict, so it is part of the key.
    note = json.dumps(source.facts, sort_keys=True)  # not canonical(): a lying note may hold NaN
    recipe = f"octavo file {hashlib.sha256(note.encode()).hexdigest()[:32]}"
    key = CheckpointKey(
        source.spec.facts(), content.body, content.projection, recipe, "none", SCHEMA
    )
    if (entry := cache.get("checkpoint", key)) is not None:
        return entry, True

    def write(file: BinaryIO) -> None:
        with source.path.open("rb") as data:
            shutil.copyfileobj(data, file, 16 * 2**20)
        if not is_unchanged(detected):
            raise FileError(source.path, "changed while it was being copied", "start again")

    with cache.lock(key, on_wait=_waiting(encoder.name, report)):
        if (entry := cache.get("checkpoint", key)) is not None:
            return entry, True
        facts = {"recipe": str(source.facts.get("recipe"))}
        return cache.put("checkpoint", key, write, facts), False


@dataclass(frozen=True)
class Sample:
    """Held-out prompts of one encoder: `rows` of token ids and their embeddings [B, S, C] FP32."""

    rows: list[list[int]]
    embeds: Tensor
    projection: Tensor | None


def sample(
    spec: EncoderSpec,
    read: Callable[[str], Tensor],
    projection: bool,
    count: int = HELD_OUT_PROMPTS,
    name: Literal["calibration", "held_out"] = "held_out",
    *,
    t5_tokens: int = T5_SAMPLE,
) -> Sample:
    """The first `count` prompts of a shipped set, padded as hosts pad them; T5's to `t5_tokens`.

    Raises `QuantizationError` where the encoder has no embeddings for their tokens.
    """
    from .backends.torch_ops import embed_tokens
    from .encoders.clip import END_TOKEN, PROJECTION
    from .encoders.t5 import END_TOKEN as T5_END_TOKEN

    needed = 1 + (T5_END_TOKEN if isinstance(spec, T5Spec) else END_TOKEN)
    if spec.vocabulary < needed:
        raise QuantizationError(
            f"{spec.family}: it has embeddings for {spec.vocabulary} tokens where at least "
            f"{needed} are needed to encode the shipped prompts; use PyTorch for it."
        )

    tokens = prompts.load_tokens(name, tokenizer_of(spec))[:count]
    if isinstance(spec, T5Spec):
        rows = prompts.padded_t5(tokens, t5_tokens, spec.vocabulary)
    else:
        rows = prompts.padded(tokens, spec.positions, spec.pad_token)
    embeds = embed_tokens(read, rows, spec.token_table)
    return Sample(rows, embeds, read(PROJECTION).float() if projection else None)


def _t5_calibration(
    spec: T5Spec, read: Callable[[str], Tensor], count: int, device: torch.device | str
) -> list[Tensor]:
    """Embeddings [B, S, C] FP32 of the calibration prompts, those of like lengths together."""
    from .backends.torch_ops import embed_tokens

    tokens = prompts.load_tokens("calibration", "t5")[:count]
    return [
        embed_tokens(read, rows, spec.token_table).to(device)
        for rows in prompts.batched_t5(tokens, T5_CALIBRATION_BATCH, spec.vocabulary)
    ]


def _quantize(
    source: Source,
    content: Fingerprint,
    recipe: Recipe,
    report: Report,
    device: torch.device | str,
) -> tuple[QuantizedTensors, dict[str, Any]]:
    """Calibrate, quantize and measure: (the checkpoint's tensors, its facts).

    CLIP's tensors are made once and kept; T5's are made when they are asked for, because all of
    them are larger than some memories.
    """
    spec, read = source.spec, source.read
    step = _steps(source.name, report)
    quantized = getattr(source, "quantized", {})
    structure = recipe.structure(spec.linears())
    if isinstance(spec, T5Spec):
        held_out, expected, ranges = _t5_reference(source, spec, recipe, quantized, report, device)
    else:
        held_out, expected, ranges = _reference(source, recipe, quantized, report, device)
    trim_memory()
    report(Progress(source.name, "quantizing"))
    tensors = QuantizedTensors(
        spec, read, structure, ranges.input_amax, weight_amax=ranges.weight_amax,
        projection=source.projection_shape is not None, quantized=quantized,
        kept=not isinstance(spec, T5Spec),
    )  # fmt: skip
    similarity, judge = similarity_of(
        spec, structure, recipe.body, tensors.__getitem__, held_out, expected,
        device=device, progress=step("verifying the graph"),
    )  # fmt: skip
    calibrated = ranges.method != NOT_CALIBRATED
    facts = {
        "spec": spec.facts(),
        "structure": structure,
        "body": recipe.body,
        "recipe": recipe.name,
        "calibration": {
            "method": ranges.method,
            "prompts": recipe.prompts if calibrated else 0,
            "set": prompts.set_id("calibration", tokenizer_of(spec)),
        },
        "similarity": {**similarity.facts(), "judge": judge},
        "source": {
            "key": encoder_key(spec, content),
            "body": content.body,
            "projection": content.projection,
        },
    }
    return tensors, facts


def _needs_ranges(
    recipe: Recipe, spec: EncoderSpec, quantized: Mapping[str, QuantizedLinear]
) -> bool:
    """Whether any FP8 linear lacks the scale of its input."""
    scaled = {name for name, linear in quantized.items() if linear.input_scale is not None}
    structure = recipe.structure(spec.linears())
    return any(kind == "fp8" and name not in scaled for name, kind in structure.items())


def _t5_reference(
    source: Source,
    spec: T5Spec,
    recipe: Recipe,
    quantized: Mapping[str, QuantizedLinear],
    report: Report,
    device: torch.device | str,
) -> tuple[Sample, States, Calibration]:
    """Held-out prompts, their FP32 states and the calibrated ranges, a block at a time."""
    from .calibrate import calibrate_by_blocks
    from .verify import States, reference_by_blocks

    step, read = _steps(source.name, report), source.read
    held_out = sample(spec, read, False)
    final = reference_by_blocks(
        spec, read, held_out.embeds, device=device, progress=step("running the FP32 reference")
    )
    _refuse_overflow(source.name, final)
    ranges = _uncalibrated()
    if _needs_ranges(recipe, spec, quantized):
        ranges = calibrate_by_blocks(
            spec, read, _t5_calibration(spec, read, recipe.prompts, device), recipe,
            device=device, progress=step("calibrating"),
        )  # fmt: skip
    return held_out, States(final, None, None), ranges


def _reference(
    source: Source,
    recipe: Recipe,
    quantized: Mapping[str, QuantizedLinear],
    report: Report,
    device: torch.device | str,
) -> tuple[Sample, States, Calibration]:
    """Held-out prompts, their FP32 states and the calibrated ranges, with the whole encoder."""
    import torch

    from .backends.torch_ops import ReferenceEncoder, StreamedEncoder
    from .calibrate import calibrate
    from .verify import reference_run, states_of

    spec, read = source.spec, source.read
    step = _steps(source.name, report)
    report(Progress(source.name, "loading the FP32 reference"))
    # Streaming reads every weight once per batch: on a GPU one batch of all, on a CPU a module.
    streamed = str(device) != "cpu"
    reference = StreamedEncoder(spec, read, device) if streamed else ReferenceEncoder(spec, read)
    batch = STREAMED_BATCH if streamed else BATCH
    held_out = sample(spec, read, source.projection_shape is not None)
    expected = states_of(
        reference_run(reference), held_out.embeds.to(device), held_out.rows, held_out.projection,
        batch=batch, progress=step("running the FP32 reference"),
    )  # fmt: skip
    _refuse_overflow(source.name, expected.final)
    ranges = _uncalibrated()
    if _needs_ranges(recipe, spec, quantized):
        embeds = sample(spec, read, False, recipe.prompts, "calibration").embeds.to(device)
        ranges = calibrate(
            reference, torch.split(embeds, batch), recipe, progress=step("calibrating")
        )
    return held_out, expected, ranges


def _refuse_overflow(name: str, final: Tensor) -> None:
    """Raise where the FP32 reference itself is of no use; `final` is its last state."""
    if not bool(final.isfinite().all()):
        raise QuantizationError(
            f"{name}: its weights overflow even in FP32 on the held-out prompts, so nothing can be "
            "compared with it; check the file, and its scales if it is FP8."
        )


def _uncalibrated() -> Calibration:
    from .calibrate import Calibration

    return Calibration({}, None, NOT_CALIBRATED)


def similarity_of(
    spec: EncoderSpec,
    structure: Structure,
    body: Body,
    read: Callable[[str], Tensor],
    held_out: Sample,
    expected: States,
    *,
    device: torch.device | str = "cpu",
    batch: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Similarity, str]:
    """(similarity to FP32, who judged): ONNX Runtime on the graph, else FP8 arithmetic in PyTorch.

    On a GPU `device` that is the FP8 tensor cores; on a CPU without ONNX Runtime, their simulation.
    `batch` prompts at a time; the tensor cores' sums depend on how many rows there are.

    ONNX Runtime has no bf16 kernels on the CPU: a bf16 graph is judged through its float32 twin,
    with the weights rounded to bf16.
    """
    import torch

    from .backends.plan_inputs import plan_weights
    from .verify import States, graph_by_blocks, graph_run, measure, states_of, twin_weights

    onnxruntime = _onnxruntime() if str(device) == "cpu" else None
    if onnxruntime is not None and isinstance(spec, T5Spec):
        final = graph_by_blocks(spec, structure, read, body, held_out.embeds, progress=progress)
        got = States(final.to(getattr(torch, body)).float(), None, None)
        return measure(expected, got), f"onnxruntime {onnxruntime.__version__}"
    if onnxruntime is None:
        run, judge = _torch_run(spec, structure, read, body, device), f"torch_fp8 on {device}"
    else:
        weights = plan_weights(spec, structure, read, body)
        twin: Body = "float32" if body == "bfloat16" else body
        graph = emit(spec, structure, body=twin)
        if twin != body:
            weights = twin_weights(weights)
        run, judge = graph_run(graph, weights), f"onnxruntime {onnxruntime.__version__}"
    got = states_of(
        run, held_out.embeds, held_out.rows, held_out.projection, batch=batch, progress=progress
    )
    return measure(expected, got), judge


def _onnxruntime() -> Any | None:
    try:
        import onnx  # noqa: F401
        import onnxruntime
    except ImportError:
        return None
    return onnxruntime


def _torch_run(
    spec: EncoderSpec,
    structure: Structure,
    read: Callable[[str], Tensor],
    body: Body,
    device: torch.device | str,
) -> Run:
    import torch

    from .backends.fp8_ops import Fp8Weights
    from .backends.torch_fp8 import TorchFp8Engine

    tensors = {name: read(name) for name in engine_tensors(spec, structure)}
    weights = Fp8Weights.from_tensors(spec, tensors, getattr(torch, body))
    engine = TorchFp8Engine(spec, weights, torch.device(device), graphs=False)

    def run(embeds: Tensor) -> tuple[Tensor | None, Tensor]:
        hidden, last = engine.encode(embeds.to(device))
        return hidden[-2] if hidden else None, last

    return run


def engine_tensors(spec: EncoderSpec, structure: Structure) -> list[str]:
    """Names of the checkpoint's tensors that an engine holds: no token table, no projection."""
    names = [name for name in spec.tensors() if name != spec.token_table]
    return names + [
        linear + part
        for linear, precision in structure.items()
        if precision == "fp8"
        for part in (".weight_scale", ".input_scale")
    ]


# Plans


def make_plan(
    subject: str,
    checkpoint: QuantizedCheckpoint,
    checkpoint_id: str,
    target: Target,
    cache: EngineCache,
    *,
    body: Body,
    flavour: Flavour = "tensorrt_rtx",
    embed: bool = False,
    mask: bool = False,
    report: Report = silent,
) -> tuple[Engine, int]:
    """(the plan for `target`, peak resident bytes of its builder; 0 if it was in the cache).

    `mask`: with an attention mask as an input; a T5's has one always.
    """
    start = time.monotonic()
    spec, structure = checkpoint.spec, checkpoint.structure
    mask = has_mask(spec, mask)
    key = plan_key(
        spec, structure, body, target.sms,
        flavour=flavour, mask=mask, checkpoint=checkpoint_id if embed else None,
    )  # fmt: skip

    def engine(entry: Entry, cached: bool) -> Engine:
        facts = entry.manifest.key_facts
        return Engine(
            target.gpu, tuple(facts["sms"]), facts["flavour"], facts["version"], facts["weights"],
            entry.manifest.key, str(entry.path), entry.manifest.length,
            round(time.monotonic() - start, 3), cached,
        )  # fmt: skip

    if (entry := find_plan(cache, key)) is not None:
        return engine(entry, True), 0
    with cache.lock(key, on_wait=_waiting(subject, report)):
        if (entry := find_plan(cache, key)) is not None:
            return engine(entry, True), 0
        _check_writer(flavour)
        with cache.temporary("plan", key) as probe:
            probe.touch()  # as above, and with the cache's own remedy
        report(Progress(subject, f"emitting ONNX for {target.gpu}"))
        graph = _graph(checkpoint, body, mask=mask, embed=embed)
        request = BuildRequest(
            flavour=flavour,
            onnx=graph.model,
            sms=() if flavour == "tensorrt" else target.sms,
            profile=_profile(spec, graph),
            weights=_external_places(checkpoint, graph),
        )
        with cache.temporary("plan", key) as temporary:
            built = build_plan(
                request,
                target=temporary,
                progress=lambda p: report(
                    Progress(subject, f"compiling for {target.gpu}: {p.phase}", p.step, p.of)
                ),
            )
            if built.version != key.version:  # pip changed the package under a running process
                raise BuildError(
                    f"plan for {target.gpu}",
                    f"it was built by {flavour} {built.version} while {key.version} was expected",
                    "start the program again",
                )
            layers = built.layers
            facts = {
                "seconds": round(built.seconds, 3),
                "peak_rss_bytes": built.peak_rss_bytes,
                "layers": None
                if layers is None
                else {
                    "fp8_gemms": len(layers.fp8_gemms),
                    "other_gemms": len(layers.other_gemms),
                    "attentions": len(layers.attentions),
                },
                "encoder": spec.family,
            }
            entry = cache.adopt("plan", key, temporary, facts)
        return engine(entry, False), built.peak_rss_bytes


def find_plan(cache: EngineCache, key: PlanKey) -> Entry | None:
    """The plan of `key`, or one built for more SMs that holds all of the key's."""
    if (entry := cache.get("plan", key)) is not None:
        return entry
    wanted = set(key.sms)
    for entry in cache.find_plans(key.facts, sm=key.sms[0], verify=False):
        if wanted <= set(entry.manifest.key_facts["sms"]):
            whole = cache.get("plan", entry.manifest.key)
            if whole is not None:
                return whole
    return None


def _profile(
    spec: EncoderSpec, graph: Graph
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    lengths = lengths_of(spec) or (spec.longest,) * 3
    low, best, high = zip(batches_of(spec), lengths, strict=True)
    profile: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
        "embeds": ((*low, spec.width), (*best, spec.width), (*high, spec.width))
    }
    if graph.mask:
        profile["mask"] = (low, best, high)
    return profile


def _graph(checkpoint: QuantizedCheckpoint, body: Body, *, mask: bool, embed: bool) -> Graph:
    if not embed:
        return emit(checkpoint.spec, checkpoint.structure, body=body, mask=mask)
    from .backends.plan_inputs import embedded_weights

    weights = embedded_weights(checkpoint, body)
    return emit(checkpoint.spec, checkpoint.structure, body=body, mask=mask, embed=weights)


def _external_places(
    checkpoint: QuantizedCheckpoint, graph: Graph
) -> dict[str, tuple[Path, int, int]]:
    places = checkpoint.locations() if graph.external else {}
    return {
        name: (checkpoint.path, *places[external.tensor])
        for name, external in graph.external.items()
    }


def copy_file(source: Path, target: Path) -> None:
    """Copy atomically; raises `FileError`. `target` is replaced if it is there."""
    with source.open("rb") as data, whole_file(Path(target), OUTPUT_REMEDY) as out:
        shutil.copyfileobj(data, out, 16 * 2**20)


# Verification


@dataclass(frozen=True)
class Verified:
    """One encoder measured again on all held-out prompts."""

    name: str
    family: str
    key: str
    similarity: dict[str, Any]
    judge: str
    floor: dict[str, float]
    shortfall: str | None

    def facts(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.shortfall is None}


def verify(
    path: str | os.PathLike[str],
    *,
    recipe: Recipe,
    cache: EngineCache | None = None,
    encoders: Sequence[str] = (),
    activation: str | None = None,
    report: Report = silent,
) -> list[Verified]:
    """Measure the checkpoint of `path` against FP32 on every held-out prompt.

    The cache's, or made now. A file that Octavo wrote has no FP32 weights: its graph is measured
    against its own FP8 weights, widened. Raises `OctavoError` for bad input; a shortfall is in the
    result.
    """
    from .backends.torch_ops import ReferenceEncoder
    from .verify import States, reference_by_blocks, reference_run, states_of

    cache = cache or EngineCache()
    _check_calibration(recipe)
    detected = detect(path, activation=activation)
    results = []
    for encoder in select(detected, encoders):
        content = content_of(encoder, detected, cache, report)
        entry, _ = checkpoint_of(encoder, detected, content, recipe, cache, report)
        checkpoint = open_quantized(entry.path, entry.identity)
        read = checkpoint.dense if detected.is_octavo else encoder.read
        spec = encoder.spec
        held_out = sample(spec, read, encoder.projection_shape is not None, 10**9)
        step = _steps(encoder.name, report)
        running = step("running the FP32 reference")
        if isinstance(spec, T5Spec):
            final = reference_by_blocks(spec, read, held_out.embeds, progress=running)
            expected = States(final, None, None)
        else:
            reference = ReferenceEncoder(spec, read)
            expected = states_of(
                reference_run(reference), held_out.embeds, held_out.rows, held_out.projection,
                progress=running,
            )  # fmt: skip
            del reference
        _refuse_overflow(encoder.name, expected.final)
        similarity, judge = similarity_of(
            spec, checkpoint.structure, _body_of(checkpoint), checkpoint.read, held_out, expected,
            progress=step("running the graph"),
        )  # fmt: skip
        from .recipes import shortfall

        results.append(
            Verified(
                encoder.name,
                spec.family,
                entry.manifest.key,
                similarity.facts(),
                judge,
                asdict(floor := recipe.of(spec).floor),
                shortfall(similarity.facts(), floor),
            )
        )
    return results
