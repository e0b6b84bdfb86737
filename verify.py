# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""One metric for every comparison, and ONNX Runtime as the judge of the graph that was compiled."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .backends.onnx_ops import Body, Graph, emit_block
from .backends.plan_inputs import plan_weights
from .backends.torch_ops import Read, Reference, ReferenceBlock, end_positions, pool
from .checkpoints.quantized import Structure
from .encoders import T5Spec
from .encoders.t5 import FINAL_NORM
from .errors import OctavoError

ORT_MINIMUM = (1, 30)  # 1.24 rejects FP8 graphs ("MatMulIntegerToFloat")


@dataclass(frozen=True)
class States:
    """What is compared: final normed and next-to-last hidden state [B, S, C], pooled [B, P].

    T5 has the final state alone.
    """

    final: Tensor
    penultimate: Tensor | None
    pooled: Tensor | None


# embeds [b, S, C] -> (the hidden state before the last, None for T5; the final normed state)
Run = Callable[[Tensor], tuple[Tensor | None, Tensor]]


@dataclass(frozen=True)
class Similarity:
    """Cosines against FP32 over all positions of `final` and `penultimate`; NaN counts as -1.

    `token_mean` and `token_min` over both states; `pooled` the mean over the prompts, after the
    projection, None where there is none; `max_abs_error` in units of the states,
    None where it is not finite.
    """

    token_mean: float
    token_min: float
    pooled: float | None
    max_abs_error: float | None
    prompts: int

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def measure(reference: States, got: States) -> Similarity:
    """Compare two sets of states of the same prompts; devices and float dtypes may differ."""

    def cosine(a: Tensor, b: Tensor) -> Tensor:
        # float64: on 16-bit states the rounding of the metric itself would show in the fourth digit
        return F.cosine_similarity(a.double().cpu(), b.double().cpu(), dim=-1)

    pairs = [(reference.final, got.final)]
    if reference.penultimate is not None and got.penultimate is not None:
        pairs.append((reference.penultimate, got.penultimate))
    tokens = torch.stack([cosine(a, b) for a, b in pairs]).nan_to_num(nan=-1.0)
    # Not Python's max(), which loses a NaN that comes second.
    error = float(
        torch.stack([(a.double().cpu() - b.double().cpu()).abs().max() for a, b in pairs]).max()
    )
    pooled = None
    if reference.pooled is not None and got.pooled is not None:
        pooled = float(cosine(reference.pooled, got.pooled).nan_to_num(nan=-1.0).mean())
    return Similarity(
        float(tokens.mean()),
        float(tokens.min()),
        pooled,
        error if math.isfinite(error) else None,  # JSON knows no infinity
        len(reference.final),
    )


def states_of(
    run: Run,
    embeds: Tensor,
    rows: Sequence[Sequence[int]],
    projection: Tensor | None,
    *,
    batch: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> States:
    """`run(embeds [b, S, C]) -> (penultimate, final)` over all `rows` in batches."""
    finals, penultimates = [], []
    for start in range(0, len(embeds), batch):
        penultimate, final = run(embeds[start : start + batch])
        finals.append(final.float())
        if penultimate is not None:
            penultimates.append(penultimate.float())
        if progress:
            progress(min(start + batch, len(embeds)), len(embeds))
    final = torch.cat(finals)
    pooled = None if projection is None else pool(final, end_positions(rows), projection.float())
    return States(final, torch.cat(penultimates) if penultimates else None, pooled)


def reference_run(reference: Reference) -> Run:
    """The FP32 reference as a `run` for `states_of`."""

    def run(embeds: Tensor) -> tuple[Tensor | None, Tensor]:
        with torch.no_grad():
            hidden, last = reference(embeds)
        return hidden[-2] if hidden else None, last

    return run


def graph_run(graph: Graph, weights: Mapping[str, Tensor], *, model_path: str | None = None) -> Run:
    """`graph` in ONNX Runtime on the CPU as a `run` for `states_of`.

    `weights` are the inputs of a shared graph. An embedded graph names its checkpoint by a relative
    path, so it must lie in a file (`model_path`) beside it. ONNX Runtime has no bf16 kernels: give
    the float32 twin. Raises `OctavoError` if ONNX Runtime is missing or too old.
    """
    try:
        import onnx
        import onnxruntime as ort
    except ImportError as error:
        raise OctavoError(
            f"verification needs onnxruntime and onnx ({error}); "
            "install them with 'pip install \"octavo[verify]\"'."
        ) from error
    version = tuple(int(part) for part in ort.__version__.split(".")[:2])
    if version < ORT_MINIMUM:
        raise OctavoError(
            f"onnxruntime {ort.__version__} cannot run FP8 graphs; "
            "install 1.30 or newer with 'pip install -U onnxruntime'."
        )
    options = ort.SessionOptions()
    options.log_severity_level = 3
    # With it the second run plans one block for every dequantized weight beside what the first run
    # allocated: 2.6 GB more for CLIP-G, and not a bit faster.
    options.enable_mem_pattern = False
    session = ort.InferenceSession(
        model_path or graph.model, options, providers=["CPUExecutionProvider"]
    )
    float8 = onnx.TensorProto.FLOAT8E4M3FN
    dtype = getattr(torch, graph.embeds.dtype)
    binding = session.io_binding()
    held = []  # ONNX Runtime keeps addresses, not references
    for name, tensor in weights.items():
        tensor = tensor.contiguous()
        if tensor.dtype == torch.float8_e4m3fn:
            array = tensor.view(torch.uint8).numpy()
            value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, float8)
        else:
            array = tensor.numpy()
            value = ort.OrtValue.ortvalue_from_numpy(array)
        held.append((tensor, array, value))
        binding.bind_ortvalue_input(name, value)
    # The hidden state before the last, if there are any, and the final state.
    wanted = (*graph.outputs[-3:-2], graph.outputs[-1])

    def run(embeds: Tensor) -> tuple[Tensor | None, Tensor]:
        binding.bind_cpu_input("embeds", embeds.to(dtype).contiguous().numpy())
        if graph.mask:
            ones = torch.ones(embeds.shape[:2], dtype=torch.bool).numpy()
            binding.bind_cpu_input("mask", ones)
        binding.clear_binding_outputs()
        for name in wanted:
            binding.bind_output(name)
        session.run_with_iobinding(binding)
        *hidden, final = (torch.from_numpy(a) for a in binding.copy_outputs_to_cpu())
        return hidden[0] if hidden else None, final

    run.held = held  # type: ignore[attr-defined]
    return run


def twin_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a bfloat16 graph for its float32 twin: rounded already, only widened here."""
    return {n: w.float() if w.dtype.itemsize > 1 else w for n, w in weights.items()}


def graph_by_blocks(
    spec: T5Spec,
    structure: Structure,
    read: Read,
    body: Body,
    embeds: Tensor,
    *,
    batch: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """The final state [B, S, C] of a T5 graph in ONNX Runtime, of which one block is in memory.

    The same operations as the whole graph's float32 twin: what goes from block to block is FP32.
    Each batch widens the weights anew, which takes as long as its products.
    `progress(done, total)` counts blocks. Raises `OctavoError` as `graph_run`.
    """
    states = list(embeds.float().split(batch))
    for index in range(spec.layers):
        weights = twin_weights(plan_weights(spec, structure, read, body, block=index))
        run = graph_run(emit_block(spec, structure, index, body="float32"), weights)
        states = [run(x)[1] for x in states]
        if progress:
            progress(index + 1, spec.layers)
    return _final(spec, read, torch.cat(states))


def reference_by_blocks(
    spec: T5Spec,
    read: Read,
    embeds: Tensor,
    *,
    batch: int = 16,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """The FP32 final state [B, S, C] of a T5 of which one block is in memory, on `device`."""
    states = list(embeds.to(device).float().split(batch))
    for index in range(spec.layers):
        block = ReferenceBlock(spec, read, index, device=device)
        with torch.no_grad():
            states = [block(x) for x in states]
        if progress:
            progress(index + 1, spec.layers)
    return _final(spec, read, torch.cat(states))


def _final(spec: T5Spec, read: Read, x: Tensor) -> Tensor:
    weight = read(FINAL_NORM + ".weight").to(x.device).float()
    return F.rms_norm(x, weight.shape, weight, spec.norm_eps)
