# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""AcceleratedEncoder: one live encoder in a host, on the first engine that proves itself.

Nothing happens before the first `encode`. Then: content key, checkpoint (cache or calibration),
engines in the order of choose.py, each checked against the host's own weights in FP32. What fails
is demoted with its reason: the next engine, then the next recipe, at last the host's PyTorch, which
is always there and always right. A request that an engine was not built for goes to the host, never
to a guess.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from . import trt
from .backends.amax import AmaxRecorder
from .backends.fp8_ops import Fp8Linear, Fp8Weights
from .backends.onnx_ops import emit
from .backends.plan_inputs import plan_weights
from .backends.torch_fp8 import TorchFp8Engine
from .backends.torch_ops import StreamedEncoder, embed_tokens
from .checkpoints import Fingerprint
from .checkpoints.quantized import QuantizedCheckpoint, open_quantized
from .choose import (
    VARIABLE,
    EngineName,
    Packages,
    Rejected,
    chosen,
    ladder,
    probe_packages,
    requested,
)
from .compile import (
    STREAMED_BATCH,
    T5_LENGTHS,
    Progress,
    Report,
    Sample,
    Target,
    batches_of,
    engine_tensors,
    fingerprint_of,
    has_mask,
    lengths_of,
    make_checkpoint,
    make_plan,
    sample,
    silent,
)
from .device import Device, probe
from .encoders import EncoderSpec, T5Spec, encode
from .engine_cache import EngineCache, Entry
from .errors import (
    CacheError,
    Cancelled,
    EngineUnavailable,
    FileError,
    OctavoBug,
    OctavoError,
    SimilarityError,
)
from .recipes import Floor, Recipe, load_recipe, shortfall
from .requantize import Requantizer, widened
from .verify import Similarity, States, measure, states_of

log = logging.getLogger(__name__)

CHECK_PROMPTS = 3  # the first held-out prompts: empty, about 20 tokens, 77 tokens
KNOWN_KINDS = 64  # shapes and dtypes of requests that were found to fit
KEPT_WEIGHT_SETS = 2  # patched sets (LoRA) that stay quantized on the GPU: going to and fro
KEPT_BYTES = 2 << 30  # of them; one set of a T5-XXL has more and is quantized again when asked for
Hidden = Sequence[Tensor]
_UNPROVEN: Hashable = object()  # as `_Serving.loaded`: a set that no request may be served with

# What Octavo's own work may raise and the next engine, or the host, answers instead. Out of GPU
# memory and a failing cuBLAS are RuntimeErrors, and so is a thread that cannot be started.
_OURS = (OctavoError, OctavoBug, RuntimeError, MemoryError, OSError, SafetensorError)
_SHORTAGES = (
    "allocate memory",
    "enough memory",
    "out of memory",
    "memory ran out",
    "alloc_failed",
    "start new thread",
    "too many open files",
)

# Engines that failed, for the life of the process: `_failure_key` -> reason. A driver or a
# GPU that refused a plan once refuses it again, and each try costs seconds.
_failed: dict[tuple[str, ...], str] = {}

EXIT_WAIT_S = 5.0
_builders: weakref.WeakSet[AcceleratedEncoder] = weakref.WeakSet()  # have a thread, or had one


@atexit.register
def _end_builds() -> None:
    """Python ends with its threads stopped anywhere, and native code they are in may then abort."""
    for encoder in list(_builders):
        encoder.cancel()
    for encoder in list(_builders):
        encoder.wait(EXIT_WAIT_S)


class Host(Protocol):
    """What an encoder's owner provides. Names are canonical (encoders/clip.py)."""

    @property
    def name(self) -> str:
        """Shown to people: "clip_l"."""
        ...

    @property
    def spec(self) -> EncoderSpec: ...

    @property
    def projection_shape(self) -> tuple[int, int] | None: ...

    @property
    def device(self) -> torch.device:
        """Where `encode` runs."""
        ...

    def read(self, name: str) -> Tensor:
        """The unpatched weight `name`, any float dtype, any device; not kept for long.

        Memory of its own: the next reads must not overwrite it.
        The values must stay what they were at the first prompt: a host whose weights change passes
        the new ones as `Patched`, or closes the encoder and makes another.
        """
        ...

    def encode(self, embeds: Tensor, mask: Tensor | None) -> tuple[Hidden, Tensor]:
        """The host's own PyTorch: (L+1 hidden states, final normed state), [B, S, C] each."""
        ...


class Engine(Protocol):
    """What TorchFp8Engine and trt.session.Session have in common."""

    @property
    def bytes(self) -> int: ...
    def encode(self, embeds: Tensor, mask: Tensor | None = None) -> tuple[Hidden, Tensor]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Patched:
    """Weights with a LoRA or a merge applied, told apart by `identity`.

    `changed`: for a host whose own weights are FP8, the names of those that differ from them; the
    rest keeps its codes. None: all are quantized anew.
    """

    identity: Hashable
    read: Callable[[str], Tensor]
    changed: Collection[str] | None = None

    def __post_init__(self) -> None:
        if self.identity is None:
            raise ValueError("Patched.identity is None, which stands for the base; name the set")


@dataclass(frozen=True)
class Refusal:
    """One step that did not serve: `engine` with `recipe`, and why in one sentence."""

    engine: str
    recipe: str
    reason: str


@dataclass(frozen=True)
class EncoderReport:
    """How an encoder is served now. Seconds, bytes; None where it does not apply (host)."""

    name: str
    family: str
    engine: EngineName
    recipe: str | None = None
    checkpoint: str | None = None
    plan: str | None = None
    similarity: Similarity | None = None
    ready_s: float | None = None
    vram_bytes: int = 0
    milliseconds: dict[str, float] = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()

    def text(self) -> str:
        """A few lines for a log or a node."""
        lines = [f"{self.name} ({self.family}): {self.engine}"]
        if self.recipe:
            lines[0] += f", recipe {self.recipe}"
        if self.similarity:
            s = self.similarity
            pooled = "-" if s.pooled is None else f"{s.pooled:.4f}"
            lines.append(
                f"  similarity to FP32: token mean {s.token_mean:.4f}, min {s.token_min:.4f}, "
                f"pooled {pooled}"
            )
        if self.ready_s is not None:
            lines.append(f"  ready in {self.ready_s:.1f} s, {self.vram_bytes / 1e6:.0f} MB of VRAM")
        lines += [f"  {name}: {ms:.2f} ms for 1 prompt" for name, ms in self.milliseconds.items()]
        # A missing package is the same for every recipe: once is enough.
        reasons: dict[tuple[str, str], list[str]] = {}
        for r in self.refusals:
            reasons.setdefault((r.engine, r.reason), []).append(r.recipe)
        for (engine, reason), recipes in reasons.items():
            lines.append(f"  not {engine} with {', '.join(recipes)}: {reason}")
        return "\n".join(lines)


@dataclass
class _Serving:
    """A loaded engine. `weights` are the base's; `load` puts a set of FP8 tensors under it."""

    engine_name: EngineName
    engine: Engine
    load: Callable[[Fp8Weights], None]
    recipe: Recipe
    weights: Fp8Weights
    checkpoint: Entry
    plan: str | None
    similarity: Similarity
    expected: States
    source: QuantizedCheckpoint  # of whose mapped file `weights` are
    masks: bool = True  # whether it takes a mask; CLIP's plans are built without one
    loaded: Hashable = None  # the identity of the set that is under the engine; None is the base


class AcceleratedEncoder:
    """`encode(embeds, mask)` on whatever this machine can do, never wrong. Thread-safe.

    `recipe`: where the ladder starts. `engine`: "auto", "fastest" or one name (OCTAVO_ENGINE
    overrides "auto"); a forced engine that cannot serve raises EngineUnavailable. `background`:
    serve with torch_fp8 or the host while TensorRT compiles, and switch between two requests.
    `calibration`: rows of token ids whose input ranges widen those of the shipped prompts.
    """

    def __init__(
        self,
        host: Host,
        *,
        recipe: str = "fp8",
        engine: str = "auto",
        floor: Floor | None = None,
        cache: EngineCache | None = None,
        background: bool = False,
        report: Report = silent,
        calibration: Sequence[Sequence[int]] = (),
        device: Device | None = None,
        packages: Packages | None = None,
    ) -> None:
        self._host = host
        self._recipe = load_recipe(recipe).of(host.spec)
        self._engine, self._variable = engine, os.environ.get(VARIABLE)
        self._request = "auto"  # what they come to, once prepared
        self._floor = floor
        self._cache = cache or EngineCache()
        self._background = background
        self._progress = _known_again(report)
        self._calibration = calibration
        self._ranges: dict[str, Tensor] = {}  # of the inputs, on the prompts of `calibration`
        self._facts, self._packages = device, packages
        self._lock = threading.RLock()
        self._content: Fingerprint | None = None
        self._prepared = False
        self._closed = False
        self._serving: _Serving | None = None
        self._next: _Serving | None = None  # built in the background, taken at the next request
        self._resting: _Serving | None = None  # closed to free its memory; started again when asked
        self._worker: threading.Thread | None = None
        self._cancel = threading.Event()
        self._refusals: list[Refusal] = []
        self._ran_out: dict[tuple[str, ...], str] = {}  # as _failed, for this encoder only
        self._known_kinds: set[tuple[Any, ...]] = set()
        self._sets: OrderedDict[Hashable, Fp8Weights] = OrderedDict()
        self._bad_sets: set[Hashable] = set()
        self._ready_s: float | None = None
        self._milliseconds: dict[str, float] = {}

    # -- serving --------------------------------------------------------------------------------

    def encode(
        self, embeds: Tensor, mask: Tensor | None = None, patched: Patched | None = None
    ) -> tuple[Hidden, Tensor]:
        """Token embeddings [B, S, C] -> (L+1 hidden states, final normed state), fresh tensors.

        `mask` [B, S], true or non-zero = attend. With `patched` the result is that of the patched
        weights: the host's `encode` must then compute with them too. Dtype is the engine's body, or
        the host's. Raises only what the host raises, what `report` raises to cancel,
        EngineUnavailable for a forced engine, and OctavoError after `close`.
        """
        served = self.attempt(embeds, mask, patched)
        return self._host.encode(embeds, mask) if served is None else served

    def attempt(
        self, embeds: Tensor, mask: Tensor | None = None, patched: Patched | None = None
    ) -> tuple[Hidden, Tensor] | None:
        """As `encode`, but None where the host's PyTorch must answer: the caller then runs it."""
        with self._lock:
            if self._closed:
                raise OctavoError(
                    f"{self._host.name}: this accelerated encoder is closed; make a new one."
                )
            if not self._prepared:
                self.prepare()
            self._take_background()
            self._wake()
            if mask is not None and mask.shape == embeds.shape[:2] and bool((mask != 0).all()):
                mask = None  # the same thing, and every engine takes it
            while (serving := self._serving) is not None and self._fits(embeds, mask):
                if mask is not None and not serving.masks:
                    break
                try:
                    if not self._has_loaded(serving, patched):
                        serving.source.check()  # the weights of the base are its mapped pages
                    if self._load(serving, patched):
                        return serving.engine.encode(embeds, mask if mask is None else mask.bool())
                    break
                except FileError as error:
                    reason, passing = _fault(error)
                    renew = True
                except _OURS as error:
                    reason, passing = _fault(error)
                    renew = False
                    if isinstance(error, EngineUnavailable):
                        reason = error.reason
                    elif isinstance(error, torch.cuda.OutOfMemoryError):
                        reason = f"out of GPU memory in a call ({reason})"
                # Out here: a traceback to the error would keep all that the failed call had made.
                if renew:
                    self._renew(serving, reason)
                else:
                    self._demote(serving, reason, memory=passing)
        return None

    def _fits(self, embeds: Tensor, mask: Tensor | None) -> bool:
        """Whether any engine of this spec may answer; everything else is the host's."""
        kind = (embeds.shape, embeds.dtype, embeds.device, embeds.requires_grad)
        if kind not in self._known_kinds:  # each of these questions costs a microsecond a prompt
            spec = self._host.spec
            if (
                embeds.dim() != 3
                or embeds.shape[0] < 1
                or not 1 <= embeds.shape[1] <= spec.longest
                or embeds.shape[2] != spec.width
                or not embeds.is_floating_point()
                or embeds.dtype == torch.float64
                or embeds.requires_grad
                or embeds.device != self._host.device
            ):
                return False
            if len(self._known_kinds) < KNOWN_KINDS:
                self._known_kinds.add(kind)
        if mask is None:
            return True
        if mask.shape != embeds.shape[:2]:
            return False
        # In CLIP a row whose first key is masked has a query with nothing to attend to, and hosts
        # differ there. In T5 it attends to everything alike.
        return isinstance(self._host.spec, T5Spec) or bool((mask[:, 0] != 0).all())

    # -- preparing ------------------------------------------------------------------------------

    def prepare(self) -> EncoderReport:
        """Choose, build or load, and check an engine now instead of at the first prompt."""
        with self._lock:
            if not self._prepared and not self._closed:
                start = time.monotonic()
                self._prepare()
                self._prepared = True
                self._ready_s = time.monotonic() - start
                log.info("%s", self.report().text())
            return self.report()

    def _prepare(self) -> None:
        self._request = requested(self._engine, self._variable)
        forced = self._request not in ("auto", "fastest")
        try:
            if self._choose(forced):
                return
        except OctavoError:
            raise  # there is no such engine
        except _OURS as error:
            self._refuse("any engine", self._recipe, _fault(error)[0])
        if forced and self._request != "host":
            last = self._refusals[-1].reason if self._refusals else "it cannot serve here"
            last = last.removeprefix(f"{self._request}: ").rstrip(".")
            raise EngineUnavailable(self._request, last, "use engine 'auto' to let Octavo choose")

    def _choose(self, forced: bool) -> bool:
        """Put the first engine that passes in service, recipe after recipe; False if none does."""
        facts = self._facts or probe(self._host.device)
        packages = self._packages or probe_packages()
        recipe: Recipe | None = self._recipe
        while recipe is not None:
            decisions = ladder(facts, packages, fp8=recipe.format == "fp8")
            engines = [e for e in chosen(decisions, self._request) if e != "host"]
            for decision in decisions:
                if isinstance(decision, Rejected) and not forced:
                    self._refuse(decision.engine, recipe, decision.reason)
            if engines and self._serve_first(engines, recipe, facts):
                return True
            recipe = load_recipe(recipe.demote_to).of(self._host.spec) if recipe.demote_to else None
        return False

    def _serve_first(self, engines: Sequence[EngineName], recipe: Recipe, facts: Device) -> bool:
        """Put the first of `engines` that passes in service; False if none does."""
        try:
            if self._content is None:
                self._content = fingerprint_of(self._host, self._progress)
            entry, _ = make_checkpoint(
                self._host,
                self._content,
                recipe,
                self._cache,
                self._progress,
                device=self._host.device,
            )
            checkpoint = open_quantized(entry.path, entry.identity)
            check = self.expect(self._host.read)
            if self._calibration and not self._ranges:
                self._ranges = self._observe(self._calibration)
        except _OURS as error:
            reason, _ = _fault(error)
            for name in engines:
                self._refuse(name, recipe, reason)
            return False
        able: list[_Serving] = []
        later: list[EngineName] = []
        if self._background:
            later = [e for e in engines if e.startswith("tensorrt")]
        try:
            for name in (e for e in engines if e not in later):
                key = self._failure_key(name, recipe, entry, facts)
                if known := _failed.get(key) or self._ran_out.get(key):
                    self._refuse(name, recipe, known)
                    continue
                try:
                    serving = self._start(name, recipe, entry, checkpoint, check, facts)
                except _OURS as error:
                    reason, passing = _fault(error)
                    if not passing:
                        _failed[key] = reason
                    self._refuse(name, recipe, reason)
                    continue
                able.append(serving)
                if self._request != "fastest":
                    break
            best = self._fastest(able) if self._request == "fastest" else able[0] if able else None
        except BaseException:  # an interrupt, or the caller cancelled: nothing stays loaded
            for serving in able:
                _close(serving.engine)
            raise
        self._serving = best
        if later:  # the host serves while TensorRT compiles, if nothing better does
            started = self._start_background(later, recipe, entry, checkpoint, check, facts)
            return started or best is not None
        return best is not None

    def _start(
        self,
        name: EngineName,
        recipe: Recipe,
        entry: Entry,
        checkpoint: QuantizedCheckpoint,
        check: tuple[Sample, States, dict[str, Tensor]],
        facts: Device,
        weights: Fp8Weights | None = None,
    ) -> _Serving:
        """Load one engine and let it prove itself. What it raises leaves nothing loaded.

        `weights`: the checkpoint's, where they are known; the engine was proven with them before.
        """
        held_out, expected, _ = check
        spec, device = checkpoint.spec, self._host.device
        first = weights is None
        if weights is None:
            tensors = {n: checkpoint.read(n) for n in engine_tensors(spec, checkpoint.structure)}
            weights = Fp8Weights.from_tensors(spec, tensors, getattr(torch, recipe.body))
            if self._ranges:
                weights = widened(weights, self._ranges, torch.device("cpu"))
        plan: str | None = None
        engine: Engine
        load: Callable[[Fp8Weights], None]
        if name == "torch_fp8":
            torch_engine = TorchFp8Engine(spec, weights, device)
            engine, load = torch_engine, torch_engine.swap_weights
        else:
            engine, load, plan = self._start_trt(name, checkpoint, entry, recipe, weights, facts)
        try:
            checkpoint.check()  # what was loaded is what was verified
            similarity = _check_engine(engine, held_out, expected, batches=first)
            short = shortfall(similarity.facts(), self._floor or recipe.floor)
            if short is not None:
                raise SimilarityError(f"it is not close enough to FP32 on this device: {short}")
            if first and isinstance(engine, TorchFp8Engine):
                engine.drop_graphs()  # of the check's batches; a single prompt's stays ready
                engine.encode(held_out.embeds[:1])
        except BaseException:
            _close(engine)
            raise
        masks = name == "torch_fp8" or isinstance(spec, T5Spec)
        return _Serving(
            name,
            engine,
            load,
            recipe,
            weights,
            entry,
            plan,
            similarity,
            expected,
            checkpoint,
            masks,
        )

    def _report_build(self, event: Progress) -> None:
        """Pass it on; in the background a build ends here once nobody wants it any more."""
        if self._cancel.is_set() and threading.current_thread() is self._worker:
            raise Cancelled(f"{self._host.name}: cancelled")
        self._progress(event)

    def _start_trt(
        self,
        name: EngineName,
        checkpoint: QuantizedCheckpoint,
        entry: Entry,
        recipe: Recipe,
        weights: Fp8Weights,
        facts: Device,
    ) -> tuple[Engine, Callable[[Fp8Weights], None], str]:
        from .trt.session import session_from_plan

        assert name in ("tensorrt_rtx", "tensorrt") and facts.sm is not None
        module = trt.load(name)
        plan, _ = make_plan(
            self._host.name,
            checkpoint,
            entry.manifest.key,
            Target(facts.name, (facts.sm,)),
            self._cache,
            body=recipe.body,
            flavour=name,
            report=self._report_build,
        )
        mask = has_mask(checkpoint.spec, False)
        graph = emit(checkpoint.spec, checkpoint.structure, body=recipe.body, mask=mask)
        device = self._host.device

        def inputs(of: Fp8Weights) -> dict[str, Tensor]:
            tensors = _as_tensors(of)
            made = plan_weights(
                checkpoint.spec, checkpoint.structure, tensors.__getitem__, recipe.body
            )
            return {n: t.to(device) for n, t in made.items()}

        found = self._cache.get("plan", plan.key, verify=False)
        session = session_from_plan(
            Path(plan.path),
            module=module,
            graph=graph,
            weights=inputs(weights),
            device=device,
            sha256=None if found is None else found.manifest.sha256,
            runtime_cache=Path(plan.path).with_suffix(""),
            batches=batches_of(checkpoint.spec),
            lengths=lengths_of(checkpoint.spec),
        )
        return session, lambda of: session.swap_weights(inputs(of)), plan.key

    # -- proving --------------------------------------------------------------------------------

    def expect(self, read: Callable[[str], Tensor]) -> tuple[Sample, States, dict[str, Tensor]]:
        """The check prompts, their FP32 results from `read`, and the input ranges they reach."""
        spec, device = self._host.spec, self._host.device
        held_out = self._held_out(read)
        recorder = AmaxRecorder()
        reference = StreamedEncoder(spec, read, device)

        def run(embeds: Tensor) -> tuple[Tensor | None, Tensor]:
            with torch.no_grad():
                hidden, last = encode(reference.ops(recorder), spec, embeds)
            return hidden[-2] if hidden else None, last

        states = states_of(run, held_out.embeds, held_out.rows, held_out.projection)
        return held_out, states, recorder.amax

    def _observe(self, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Per linear, the largest |input| that rows of token ids [S] reach in FP32."""
        spec, read, device = self._host.spec, self._host.read, self._host.device
        recorder = AmaxRecorder()
        ops = StreamedEncoder(spec, read, device).ops(recorder)
        with torch.no_grad():
            for start in range(0, len(rows), STREAMED_BATCH):
                embeds = embed_tokens(read, rows[start : start + STREAMED_BATCH], spec.token_table)
                encode(ops, spec, embeds.to(device))
        return recorder.amax

    def _held_out(self, read: Callable[[str], Tensor]) -> Sample:
        """The check prompts, on the host's device."""
        device = self._host.device
        held_out = sample(
            self._host.spec,
            read,
            self._host.projection_shape is not None,
            CHECK_PROMPTS,
            t5_tokens=T5_LENGTHS[1],  # what FLUX pads to, and the kernels of long prompts
        )
        return replace(
            held_out,
            embeds=held_out.embeds.to(device),
            projection=None if held_out.projection is None else held_out.projection.to(device),
        )

    # -- patched weights ------------------------------------------------------------------------

    def _has_loaded(self, serving: _Serving, patched: Patched | None) -> bool:
        return serving.loaded == (None if patched is None else patched.identity)

    def _load(self, serving: _Serving, patched: Patched | None) -> bool:
        """Put the wanted set under the engine; False if it must be the host's."""
        identity = None if patched is None else patched.identity
        if self._has_loaded(serving, patched):
            return True
        if identity in self._bad_sets:
            return False
        if patched is None or identity in self._sets:
            if patched is not None:
                self._sets.move_to_end(identity)
            # An interrupt may come between the two: an unproven set is never taken for another.
            serving.loaded = _UNPROVEN
            serving.load(serving.weights if patched is None else self._sets[identity])
            serving.loaded = identity
            return True
        short: str | None
        proving = False
        try:
            requantizer = Requantizer(
                serving.weights, patched.read, self._host.device, patched.changed
            )
            held_out, expected, amax = self.expect(requantizer)
            weights = requantizer.weights(amax)
            proving = True
            serving.loaded = _UNPROVEN
            serving.load(weights)
            similarity = _check_engine(serving.engine, held_out, expected, batches=False)
            short = shortfall(similarity.facts(), self._floor or serving.recipe.floor)
        except EngineUnavailable:
            raise
        except _OURS as error:
            short, passing = _fault(error)
            # A shortage is no fault of the set, nor is what an engine raises that is no verdict.
            if not isinstance(error, OctavoError) and (proving or passing):
                raise
        if short is not None:
            self._bad_sets.add(identity)
            log.warning("%s: patched weights are served by the host: %s", self._host.name, short)
            return False
        serving.loaded = identity
        self._sets[identity] = weights
        while self._sets and (
            len(self._sets) > KEPT_WEIGHT_SETS or self._sets_bytes() > KEPT_BYTES
        ):
            self._sets.popitem(last=False)
        return True

    # -- the fastest ----------------------------------------------------------------------------

    def _fastest(self, able: list[_Serving]) -> _Serving | None:
        """Time each once on one prompt; the choice is kept with the checkpoint and found again.

        One that fails meanwhile is refused, and leaves `able`; None if none is left.
        """
        if not able:
            return None
        spec = self._host.spec
        tokens = T5_LENGTHS[1] if isinstance(spec, T5Spec) else spec.positions
        embeds = torch.zeros(1, tokens, spec.width, device=self._host.device)
        facts = self._facts or probe(self._host.device)
        noted = able[0].checkpoint.manifest.facts.get("fastest")
        noted = noted if isinstance(noted, dict) else {}
        times = _sound_times(noted.get(facts.name), {s.engine_name for s in able})
        if times is None:
            times = {}
            for serving in list(able):
                try:
                    times[serving.engine_name] = _milliseconds(serving.engine, embeds)
                    continue
                except _OURS as error:
                    reason, passing = _fault(error)
                able.remove(serving)
                self._refuse(serving.engine_name, serving.recipe, reason)
                if not passing:
                    name, recipe = serving.engine_name, serving.recipe
                    _failed[self._failure_key(name, recipe, serving.checkpoint, facts)] = reason
                _close(serving.engine)
            if not able:
                return None
            with suppress(*_OURS):
                self._cache.update_facts(
                    able[0].checkpoint, {"fastest": {**noted, facts.name: times}}
                )
        self._milliseconds = times
        best = min(able, key=lambda s: times[s.engine_name])
        for serving in able:
            if serving is not best:
                self._refuse(
                    serving.engine_name,
                    serving.recipe,
                    f"{best.engine_name} is faster here ({times[best.engine_name]:.2f} against "
                    f"{times[serving.engine_name]:.2f} ms)",
                )
                _close(serving.engine)
        return best

    # -- in the background ----------------------------------------------------------------------

    def _start_background(self, engines: list[EngineName], *arguments: Any) -> bool:
        """Whether a thread builds now."""
        if self._worker is not None and self._worker.is_alive():
            return True  # what it builds is checked, and will do
        recipe = arguments[0]

        def work() -> None:
            for name in engines:
                try:
                    serving = self._start(name, *arguments)
                except Cancelled:
                    return
                except Exception as error:
                    cancelled = _theirs(error) is not None
                    if not cancelled and not isinstance(error, _OURS):
                        raise
                    with self._lock:
                        self._refuse(name, recipe, _reason(error))
                    if cancelled:  # there is no caller here who could be told
                        return
                    continue
                with self._lock:
                    if self._closed:
                        _close(serving.engine)
                    elif self._resting is not None:  # no memory is to be held; `_wake` loads it
                        _close(serving.engine)
                        self._resting = serving
                    else:
                        self._next = serving
                return

        self._worker = threading.Thread(target=work, name="octavo-build", daemon=True)
        _builders.add(self)
        try:
            self._worker.start()
        except RuntimeError as error:  # the system grants no thread
            self._worker = None
            for name in engines:
                self._refuse(name, recipe, _reason(error))
            return False
        return True

    def _take_background(self) -> None:
        """Switch to what was built in the background: between two requests, and before a rest."""
        if self._next is not None:
            old, self._serving, self._next = self._serving, self._next, None
            if old is not None:
                _close(old.engine)
            log.info("%s: %s serves from now on", self._host.name, self._serving.engine_name)

    def cancel(self) -> None:
        """End a build in the background at its next step."""
        self._cancel.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for a background build; True if none is running any more."""
        worker = self._worker
        if worker is not None:
            worker.join(timeout_s)
        return worker is None or not worker.is_alive()

    # -- giving memory back ---------------------------------------------------------------------

    def rest(self) -> int:
        """Free all device memory; the next request, or `resume`, loads the same engine again.

        Returns the bytes freed. For a host that manages memory.
        """
        with self._lock:
            self._take_background()
            serving = self._serving
            if serving is None:
                return 0
            freed = self.vram_bytes
            self._serving, self._resting = None, serving
            _close(serving.engine)
            self._sets.clear()
            return freed

    def drop_sets(self) -> int:
        """Free the patched sets that are kept for later, the first thing to go; bytes freed."""
        with self._lock:
            freed = self._sets_bytes()
            self._sets.clear()
            return freed

    def resume(self) -> bool:
        """Load what `rest` put away; the host serves while there is no memory for it.

        True if there was something to load.
        """
        with self._lock:
            resting = self._resting is not None and not self._closed
            if resting:
                self._wake()
            return resting

    @property
    def has_engine(self) -> bool:
        """Whether an engine serves, or will once `rest` is over; False while the host does."""
        return (self._serving or self._resting) is not None

    def _wake(self) -> None:
        if (resting := self._resting) is None:
            return
        try:
            resting.source.check()
            check = (self._held_out(self._host.read), resting.expected, dict[str, Tensor]())
            self._serving = self._start(
                resting.engine_name,
                resting.recipe,
                resting.checkpoint,
                open_quantized(resting.checkpoint.path),
                check,
                self._facts or probe(self._host.device),
                resting.weights,
            )
            self._serving.source = resting.source
            self._resting = None
            return
        except _OURS as error:
            reason, passing = _fault(error)
            gone = isinstance(error, FileError | CacheError)
        if passing and not gone:
            log.warning("%s: no memory to load it again: %s", self._host.name, reason)
        else:  # the cache was deleted, or the host's weights are others now
            log.info("%s: prepared anew: %s", self._host.name, reason)
            self._content, self._resting = None, None
            self._prepare()

    def _renew(self, serving: _Serving, reason: str) -> None:
        """End an engine whose checkpoint changed under it, and prepare another one."""
        log.warning("%s: prepared anew: %s", self._host.name, reason)
        self._sets.clear()
        self._serving, self._content = None, None
        _close(serving.engine)
        self._prepare()

    # -- demotion, report, end ------------------------------------------------------------------

    def _refuse(self, engine: str, recipe: Recipe, reason: str) -> None:
        refusal = Refusal(engine, recipe.name, reason)
        if refusal not in self._refusals:
            self._refusals.append(refusal)

    def _demote(self, serving: _Serving, reason: str, *, memory: bool = False) -> None:
        """Take a failed engine out of service for good and put the next one in. One log line.

        Out of memory (`memory`) is this encoder's alone: another one may find more.
        """
        log.warning(
            "%s: %s failed and is not used again: %s", self._host.name, serving.engine_name, reason
        )
        self._refuse(serving.engine_name, serving.recipe, reason)
        facts = self._facts or probe(self._host.device)
        key = self._failure_key(serving.engine_name, serving.recipe, serving.checkpoint, facts)
        (self._ran_out if memory else _failed)[key] = reason
        self._sets.clear()  # quantized by the failed engine's recipe
        self._bad_sets.clear()
        self._serving = None
        _close(serving.engine)
        if self._request in ("auto", "fastest"):
            self._prepare()

    def _failure_key(
        self, engine: str, recipe: Recipe, checkpoint: Entry, facts: Device
    ) -> tuple[str, ...]:
        """What fails under one floor may pass under another."""
        device, floor = f"{facts.type}:{facts.index}", str(self._floor)
        return engine, recipe.name, checkpoint.manifest.key, device, floor

    def report(self) -> EncoderReport:
        """How the encoder is served at this moment."""
        host, serving = self._host, self._serving or self._resting
        known = EncoderReport(host.name, host.spec.family, "host", refusals=tuple(self._refusals))
        if serving is None:
            return known
        return replace(
            known,
            engine=serving.engine_name,
            recipe=serving.recipe.name,
            checkpoint=serving.checkpoint.manifest.key,
            plan=serving.plan,
            similarity=serving.similarity,
            ready_s=self._ready_s,
            vram_bytes=self.vram_bytes,
            milliseconds=dict(self._milliseconds),
        )

    @property
    def vram_bytes(self) -> int:
        """Bytes of device memory held: the engine with its contexts, and the quantized sets."""
        serving = self._serving
        if serving is None:
            return 0
        return serving.engine.bytes + self._sets_bytes()

    def _sets_bytes(self) -> int:
        return sum(t.nbytes for w in self._sets.values() for t in _as_tensors(w).values())

    def close(self) -> None:
        """Free everything; `encode` raises afterwards. May be called twice."""
        self.cancel()
        with self._lock:
            self._closed = True
            for serving in (self._serving, self._next):
                if serving is not None:
                    _close(serving.engine)
            self._serving = self._next = self._resting = None
            self._sets.clear()

    def __enter__(self) -> AcceleratedEncoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_engine(
    engine: Engine, held_out: Sample, expected: States, *, batches: bool = True
) -> Similarity:
    """Similarity of an engine on the check prompts; each alone and all together must agree.

    Without `batches` each is asked alone: enough for other weights under an engine that was proven.
    Raises SimilarityError where the answer is not finite, constant, or depends on the batch.
    """

    def run(embeds: Tensor) -> tuple[Tensor | None, Tensor]:
        hidden, last = engine.encode(embeds)
        return hidden[-2] if hidden else None, last

    got = states_of(run, held_out.embeds, held_out.rows, held_out.projection, batch=1)
    states = [got.final] if got.penultimate is None else [got.final, got.penultimate]
    if not all(bool(torch.isfinite(state).all()) for state in states):
        raise SimilarityError("its answer to the check prompts is not finite")
    if float((got.final[0] - got.final[-1]).abs().max()) == 0:
        raise SimilarityError("it gives the same answer to different prompts")
    if not batches:
        return measure(expected, got)
    together = states_of(run, held_out.embeds, held_out.rows, held_out.projection)
    batch = measure(got, together)
    if not batch.token_min >= 0.99:
        raise SimilarityError(
            f"a prompt's answer depends on the batch it is in (cosine {batch.token_min:.4f})"
        )
    return measure(expected, got)


def _as_tensors(weights: Fp8Weights) -> dict[str, Tensor]:
    """`Fp8Weights` under the names of a checkpoint file."""
    tensors = dict(weights.tables)
    biases: dict[str, Tensor | None] = {}
    for name, (weight, bias) in weights.norms.items():
        tensors[name + ".weight"], biases[name + ".bias"] = weight, bias
    for name, linear in weights.linears.items():
        tensors[name + ".weight"], biases[name + ".bias"] = linear.weight, linear.bias
        if isinstance(linear, Fp8Linear):
            tensors[name + ".weight_scale"] = linear.weight_scale
            tensors[name + ".input_scale"] = linear.input_scale
    return tensors | {name: bias for name, bias in biases.items() if bias is not None}


def _milliseconds(engine: Engine, embeds: Tensor, repeats: int = 20) -> float:
    """Median wall time of one encode, milliseconds."""

    def once() -> float:
        if embeds.is_cuda:
            torch.cuda.synchronize(embeds.device)
        start = time.perf_counter()
        engine.encode(embeds)
        if embeds.is_cuda:
            torch.cuda.synchronize(embeds.device)
        return (time.perf_counter() - start) * 1e3

    for _ in range(3):
        once()
    return sorted(once() for _ in range(repeats))[repeats // 2]


def _sound_times(noted: object, names: set[EngineName]) -> dict[str, float] | None:
    """Milliseconds of each of `names` as a manifest has them; None where one is no such number."""
    if not isinstance(noted, dict):
        return None
    times = {}
    for name in names:
        ms = noted.get(name)
        # Any program can write there: null, texts, NaN, and numbers that no float holds.
        if isinstance(ms, bool) or not isinstance(ms, int | float) or not 0 < ms < 1e9:
            return None
        times[str(name)] = float(ms)
    return times


def _close(engine: Engine) -> None:
    """Close it, also where its device fails even in that: there is nothing more to be done."""
    try:
        engine.close()
    except _OURS as error:
        log.warning("an engine could not be closed in order: %s", _reason(error))


def _known_again(report: Report) -> Report:
    """`report`, but what it raises is marked as its owner's, which no refusal may swallow."""

    def reported(event: Progress) -> None:
        try:
            report(event)
        except BaseException as error:
            with suppress(AttributeError, TypeError):  # a class may forbid it
                error._octavo_theirs = True  # type: ignore[attr-defined]
            raise

    return reported


def _theirs(error: BaseException | None) -> BaseException | None:
    """The caller's own exception: `error`, or what it was made of on the way."""
    while error is not None and not getattr(error, "_octavo_theirs", False):
        error = error.__cause__
    return error


def _fault(error: BaseException) -> tuple[str, bool]:
    """(why in words, whether another try may do better). Raises what is the caller's own."""
    if (theirs := _theirs(error)) is not None:
        raise theirs
    return _reason(error), _is_passing(error)


def _is_passing(error: BaseException) -> bool:
    """A shortage of this moment, or files that are gone: no verdict on an engine."""
    if isinstance(
        error, torch.cuda.OutOfMemoryError | MemoryError | OSError | FileError | CacheError
    ):
        return True
    said = str(error).lower()
    return any(words in said for words in _SHORTAGES)


def _reason(error: BaseException) -> str:
    """Why, for a refusal: Octavo's errors are sentences, others are told with their kind."""
    said = _first_line(error)
    if isinstance(error, OctavoError | torch.cuda.OutOfMemoryError):
        return said
    kind = type(error).__name__
    shown = kind if said == kind else f"{kind}: {said.rstrip('. ')}"
    short = "the system ran short of something" if _is_passing(error) else "it failed unexpectedly"
    return f"{short} ({shown})"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
