# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Every way to run one encoder, timed side by side in one process: medians of many, after warm-up.

Baselines: "comfyui" is what ComfyUI 0.33 does (16-bit weights cast to FP32 at each call, FP32
products), then the eager half-precision encoder, the same in a CUDA graph, and transformers through
torch.compile. Floors: the FP8 GEMMs alone in a CUDA graph, and the time to read the weights once at
the measured bandwidth. Timed with wall clock around device synchronisation, so launch cost counts.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .accelerated import AcceleratedEncoder, Hidden
from .backends.plan_inputs import gemms
from .backends.torch_ops import ReferenceEncoder, StreamedEncoder
from .choose import Accepted, ladder, probe_packages
from .device import Device, probe
from .encoders import EncoderSpec, T5Spec
from .encoders.clip import PROJECTION
from .engine_cache import EngineCache
from .errors import OctavoError
from .recipes import load_recipe

Shape = tuple[int, int]  # batch, tokens
WARM_UP, REPEATS = 5, 50
BASELINES = ("comfyui", "half eager", "half CUDA graph", "transformers compiled")


@dataclass(frozen=True)
class Row:
    """Median and spread of one way at one shape, milliseconds; `similarity` is the token mean."""

    way: str
    batch: int
    tokens: int
    median_ms: float
    low_ms: float
    high_ms: float
    token_mean: float | None = None
    token_min: float | None = None


@dataclass
class Bench:
    encoder: str
    device: str
    versions: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    floors: list[dict[str, Any]] = field(default_factory=list)
    reports: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        return asdict(self)

    def median(self, way: str, shape: Shape) -> float | None:
        for row in self.rows:
            if (row.way, row.batch, row.tokens) == (way, *shape):
                return row.median_ms
        return None


class LiveHost:
    """Weights in memory as a host of AcceleratedEncoder; its own PyTorch is ComfyUI's way."""

    def __init__(
        self, name: str, spec: EncoderSpec, tensors: dict[str, Tensor], device: torch.device
    ) -> None:
        self.name, self.spec, self.device = name, spec, device
        self.tensors = tensors
        self._streamed = StreamedEncoder(spec, self.read, device)

    @property
    def projection_shape(self) -> tuple[int, int] | None:
        projection = self.tensors.get(PROJECTION)
        return None if projection is None else (projection.shape[0], projection.shape[1])

    def read(self, name: str) -> Tensor:
        return self.tensors[name]

    @torch.no_grad()
    def encode(self, embeds: Tensor, mask: Tensor | None = None) -> tuple[Hidden, Tensor]:
        return self._streamed(embeds.float(), mask if mask is None else mask.bool())


def bench(
    host: LiveHost,
    shapes: Sequence[Shape],
    *,
    cache: EngineCache | None = None,
    repeats: int = REPEATS,
    compiled: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Bench:
    """Time every way at every shape; without a GPU only the host's own way."""
    device = probe(host.device)
    result = Bench(f"{host.name} ({host.spec.family})", device.describe(), _versions(device))
    generator = torch.Generator().manual_seed(0)
    size = 1.0 if isinstance(host.spec, T5Spec) else 0.02  # of token embeddings
    inputs = {
        s: (torch.randn(*s, host.spec.width, generator=generator) * size).to(host.device)
        for s in shapes
    }
    expected = {s: host.encode(x, None)[1].float() for s, x in inputs.items()}

    def time_way(way: str, run: Callable[[Tensor], Any], *, graph: bool = False) -> None:
        for shape, x in inputs.items():
            try:
                call, output = _captured(run, x) if graph else (partial(run, x), None)
                times = _times(call, host.device, repeats)
                got = output if graph else call()
            except (RuntimeError, OctavoError) as error:
                result.skipped[f"{way} {shape[0]}x{shape[1]}"] = str(error).splitlines()[0]
                continue
            cosine = torch.nn.functional.cosine_similarity(
                _last(got).float(), expected[shape], dim=-1
            )
            result.rows.append(Row(way, *shape, *times, float(cosine.mean()), float(cosine.min())))
            say(f"{way} {shape[0]}x{shape[1]}: {times[0]:.3f} ms")

    with torch.inference_mode():
        time_way("comfyui", host.encode)
        if device.type != "cuda":
            result.skipped["everything else"] = "there is no NVIDIA GPU here"
            return result
        try:
            half = _half(host)
        except torch.cuda.OutOfMemoryError as error:
            result.skipped["half eager, half CUDA graph"] = str(error).splitlines()[0]
        else:
            time_way("half eager", half)
            time_way("half CUDA graph", half, graph=True)
            del half
    if compiled:
        _bench_transformers(host, time_way, result)
    else:
        result.skipped["transformers compiled"] = "not asked for"
    for decision in ladder(device, probe_packages()):
        if decision.engine == "host":
            continue
        if not isinstance(decision, Accepted):
            result.skipped[decision.engine] = decision.reason
            continue
        try:
            engine = AcceleratedEncoder(host, engine=decision.engine, cache=cache)
            with engine:
                result.reports.append(engine.prepare().text())
                time_way(decision.engine, engine.encode)
        except OctavoError as error:
            result.skipped[decision.engine] = str(error)
    with torch.inference_mode():
        result.floors = [_floor(host, shape, repeats) for shape in shapes]
    return result


def _half(host: LiveHost) -> Callable[[Tensor], Any]:
    dtype = torch.bfloat16 if isinstance(host.spec, T5Spec) else torch.float16
    module = ReferenceEncoder(host.spec, host.read, dtype=dtype, device=host.device)
    return lambda x: module(x.to(dtype))


def _last(output: Any) -> Tensor:
    if isinstance(output, tuple):
        return output[1]  # type: ignore[no-any-return]
    return output.last_hidden_state  # type: ignore[no-any-return]


def _transformers_model(host: LiveHost) -> Any:
    """transformers' own module of the host's weights, in half precision; raises ImportError."""
    spec = host.spec
    if isinstance(spec, T5Spec):
        from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

        kind = "relu" if spec.activation == "relu" else "gelu"
        sizes: dict[str, Any] = {
            "vocab_size": spec.vocabulary, "d_model": spec.width, "d_kv": spec.head_dim,
            "d_ff": spec.feed_forward, "num_layers": spec.layers, "num_heads": spec.heads,
            "relative_attention_num_buckets": spec.buckets, "layer_norm_epsilon": spec.norm_eps,
            "relative_attention_max_distance": spec.max_distance,
            "feed_forward_proj": f"gated-{kind}" if spec.gated else kind,
        }  # fmt: skip
        with torch.device("meta"):
            made: Any = (
                UMT5EncoderModel(UMT5Config(**sizes))
                if spec.bias_per_layer
                else T5EncoderModel(T5Config(**sizes))
            )
        model = made.to_empty(device=host.device).to(torch.bfloat16).eval()
        prefix = ""
    else:
        from transformers import CLIPTextConfig, CLIPTextModel

        config = CLIPTextConfig(
            vocab_size=spec.vocabulary, hidden_size=spec.width, num_hidden_layers=spec.layers,
            intermediate_size=spec.feed_forward, num_attention_heads=spec.heads,
            hidden_act=spec.activation, max_position_embeddings=spec.positions,
            layer_norm_eps=spec.layer_norm_eps,
        )  # fmt: skip
        with torch.device("meta"):
            made = CLIPTextModel(config)
        model = made.to_empty(device=host.device).to(torch.float16).eval()
        prefix = "text_model."
    wanted = {n.removeprefix(prefix): n for n in spec.tensors()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            canonical = name.replace("encoder.embed_tokens.weight", spec.token_table)
            parameter.copy_(host.read(wanted[canonical.removeprefix(prefix)]))
        for name, buffer in model.named_buffers():
            if name.endswith("position_ids") and not isinstance(spec, T5Spec):
                buffer.copy_(torch.arange(spec.positions)[None])
    return model


def _bench_transformers(host: LiveHost, time_way: Callable[..., None], result: Bench) -> None:
    try:
        model = _transformers_model(host)
    except ImportError as error:
        result.skipped["transformers compiled"] = f"transformers is not installed ({error})"
        return
    spec = host.spec
    ids = {}

    def run(x: Tensor) -> Any:
        shape = (x.shape[0], x.shape[1])
        if shape not in ids:
            rows = torch.randint(1, 1000, shape, generator=torch.Generator().manual_seed(1))
            if not isinstance(spec, T5Spec):
                rows[:, -1] = 49407 if spec.vocabulary > 49407 else spec.vocabulary - 1
            ids[shape] = rows.to(host.device)
        hidden = {} if isinstance(spec, T5Spec) else {"output_hidden_states": True}
        return compiled_model(input_ids=ids[shape], **hidden)

    compiled_model: Any = torch.compile(model)
    with torch.no_grad():
        time_way("transformers compiled", run)
    # It takes token ids, so its input is another one and its similarity means nothing here.
    result.rows[:] = [
        Row(r.way, r.batch, r.tokens, r.median_ms, r.low_ms, r.high_ms)
        if r.way == "transformers compiled"
        else r
        for r in result.rows
    ]
    torch.compiler.reset()


def _times(
    call: Callable[[], Any], device: torch.device, repeats: int
) -> tuple[float, float, float]:
    """(median, 10th percentile, 90th percentile) in milliseconds."""

    def once() -> float:
        _synchronize(device)
        start = time.perf_counter()
        call()
        _synchronize(device)
        return (time.perf_counter() - start) * 1e3

    for _ in range(WARM_UP):
        once()
    times = sorted(once() for _ in range(repeats))
    return times[repeats // 2], times[repeats // 10], times[-1 - repeats // 10]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _captured(run: Callable[[Tensor], Any], x: Tensor) -> tuple[Callable[[], Any], Any]:
    """(replay of `run(x)` as a CUDA graph, its static output)."""
    stream = torch.cuda.Stream(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(x)
    torch.cuda.current_stream(x.device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run(x)
    return graph.replay, output


def _floor(host: LiveHost, shape: Shape, repeats: int) -> dict[str, Any]:
    """The FP8 GEMMs alone (torch._scaled_mm in a CUDA graph) and the weights' memory traffic."""
    spec, device = host.spec, host.device
    one = torch.ones((), device=device)
    tokens = shape[0] * shape[1]
    products: list[tuple[Tensor, Tensor]] = []
    sizes = spec.linears()
    for names in gemms(spec, load_recipe("fp8").of(spec).structure(sizes), fused=True).values():
        out, inner = sum(sizes[n][0] for n in names), sizes[names[0]][1]
        rows = -(-tokens // 16) * 16  # _scaled_mm wants multiples of 16 on some devices
        products.append(
            (
                torch.zeros(rows, inner, device=device).to(torch.float8_e4m3fn),
                torch.zeros(out, inner, device=device).to(torch.float8_e4m3fn),
            )
        )

    def run(_: Tensor) -> None:
        for a, w in products:
            torch._scaled_mm(
                a, w.t(), scale_a=one, scale_b=one, out_dtype=torch.float16, use_fast_accum=True
            )

    gemm_ms: float | None = None
    with suppress(RuntimeError):
        replay, _ = _captured(run, one)
        gemm_ms = _times(replay, device, repeats)[0]
    weight_bytes = sum(w.nbytes for _, w in products)
    return {
        "batch": shape[0],
        "tokens": shape[1],
        "fp8_gemms_ms": gemm_ms,
        "weight_traffic_ms": weight_bytes / _bandwidth(device) * 1e3,
    }


_bandwidths: dict[torch.device, float] = {}


def _bandwidth(device: torch.device) -> float:
    """Bytes read per second by a reduction over 1 GiB."""
    if device not in _bandwidths:
        data = torch.zeros(2**28, device=device)
        seconds = _times(data.sum, device, 20)[0] / 1e3
        _bandwidths[device] = data.nbytes / seconds
    return _bandwidths[device]


def _versions(device: Device) -> dict[str, str]:
    from importlib import metadata

    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "transformers", "tensorrt-rtx", "tensorrt"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if device.driver:
        found["driver"] = device.driver
    if device.cuda:
        found["cuda"] = device.cuda
    return found


def shapes_of(
    spec: EncoderSpec,
    wanted: Sequence[Shape] | None,
    say: Callable[[str], object] = lambda _: None,
) -> list[Shape]:
    """What to time: what was asked for, as far as the encoder goes, or what hosts send."""
    if wanted is None:
        wanted = [(1, 256), (1, 512)] if isinstance(spec, T5Spec) else [(1, 77), (2, 77)]
    if any(tokens > spec.longest for _, tokens in wanted):
        say(f"{spec.family} takes {spec.longest} tokens at most: these are timed for more.")
    return list(dict.fromkeys((batch, min(tokens, spec.longest)) for batch, tokens in wanted))


def parse_shapes(text: str) -> list[Shape]:
    """ "1x77,2x77" -> [(1, 77), (2, 77)]; raises OctavoError."""
    return [*_parse_shapes(text)]


def _parse_shapes(text: str) -> Iterator[Shape]:
    for part in text.split(","):
        batch, _, tokens = part.strip().partition("x")
        if not (batch.isdigit() and tokens.isdigit() and int(batch) and int(tokens)):
            raise OctavoError(f"shape '{part}' is not batch x tokens; write for example 1x77,2x77.")
        yield int(batch), int(tokens)
