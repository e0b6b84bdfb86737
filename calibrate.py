# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Calibration: the range of every linear's input, by NVIDIA ModelOpt or else by our own `max`.

Both see the same prompts through the same FP32 reference, and `max` gives equal numbers either way
(tested), so which one ran does not change the checkpoint's key. An encoder that is larger than
memory goes block by block: one block of the reference at a time, its outputs are the next one's
inputs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .backends.amax import AmaxRecorder
from .backends.torch_ops import Read, Reference, ReferenceBlock, ReferenceEncoder
from .encoders import EncoderSpec, block, encode
from .errors import OctavoError, QuantizationError
from .recipes import Recipe

log = logging.getLogger(__name__)

OWN = "octavo max"


@dataclass(frozen=True)
class Calibration:
    """Per linear, the largest |input| (float32 scalars); weight ranges only where searched for."""

    input_amax: dict[str, Tensor]
    weight_amax: dict[str, Tensor] | None
    method: str  # who calibrated: "modelopt 0.47.0 max" or "octavo max"


def has_modelopt() -> bool:
    return importlib.util.find_spec("modelopt") is not None


def calibrate(
    reference: Reference,
    batches: Sequence[Tensor],
    recipe: Recipe,
    *,
    modelopt: bool | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Run `batches` of token embeddings [B, S, C] float32 through `reference`.

    `modelopt`: True demands it, False avoids it, None takes it if it is installed and works. It
    calibrates modules only: a streamed reference always uses our own `max`.
    `progress(done, total)` is called after each batch and may raise to cancel. After ModelOpt the
    module's forward is fake-quantized: take reference results before. Raises `OctavoError` if the
    recipe's algorithm needs ModelOpt and it is missing, `QuantizationError` on NaN or infinite
    ranges.
    """
    wanted = isinstance(reference, ReferenceEncoder) and _wants_modelopt(modelopt)
    if isinstance(reference, ReferenceEncoder) and wanted:
        try:
            ranges = _modelopt_ranges(reference, recipe, _each(reference, batches, progress))
            return _checked(ranges, reference.spec)
        except ImportError as error:
            _without_modelopt(error, modelopt, recipe)
    _needs_modelopt(recipe)
    recorder = AmaxRecorder()
    with torch.no_grad():
        for done, embeds in enumerate(batches, 1):
            encode(reference.ops(recorder), reference.spec, embeds)
            if progress:
                progress(done, len(batches))
    return _checked(Calibration(recorder.amax, None, OWN), reference.spec)


def calibrate_by_blocks(
    spec: EncoderSpec,
    read: Read,
    batches: Sequence[Tensor],
    recipe: Recipe,
    *,
    device: torch.device | str = "cpu",
    modelopt: bool | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """As `calibrate`, of an encoder of which one block is held in FP32, on `device`.

    `batches` [B, S, C] are what goes into block 0 and may differ in length; `read(name)` gives
    canonical weights of any float dtype. ModelOpt calibrates on the CPU only. `progress` counts
    blocks.
    """
    states = list(batches)
    inputs: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    method = OWN
    wanted = str(device) == "cpu" and _wants_modelopt(modelopt)
    if not wanted:
        _needs_modelopt(recipe)
    for index in range(spec.layers):
        one = ReferenceBlock(spec, read, index, device=device)
        outputs: list[Tensor] = []
        found = None
        if wanted:
            try:
                found = _modelopt_ranges(one, recipe, _carrying(states, outputs))
            except ImportError as error:
                _without_modelopt(error, modelopt, recipe)
                wanted = False
        if found is None:
            recorder = AmaxRecorder()
            with torch.no_grad():
                for x in states:
                    outputs.append(block(one.ops(recorder), spec, index, x))
            found = Calibration(recorder.amax, None, OWN)
        inputs |= found.input_amax
        weights |= found.weight_amax or {}
        method, states = found.method, outputs
        if progress:
            progress(index + 1, spec.layers)
    return _checked(Calibration(inputs, weights or None, method), spec)


def _wants_modelopt(asked: bool | None) -> bool:
    return has_modelopt() if asked is None else asked


def _without_modelopt(error: ImportError, asked: bool | None, recipe: Recipe) -> None:
    """Raise where ModelOpt cannot be done without; else say that it is."""
    if asked or recipe.algorithm != "max":
        raise OctavoError(
            f"NVIDIA ModelOpt cannot be imported ({error}); install it with "
            "'pip install nvidia-modelopt' or use the algorithm 'max'."
        ) from error
    log.warning("NVIDIA ModelOpt cannot be imported (%s); Octavo's own max is used.", error)


def check_algorithm(recipe: Recipe) -> None:
    """Raise OctavoError where the algorithm of `recipe` needs a ModelOpt that is not installed."""
    if recipe.calibrated and not has_modelopt():
        _needs_modelopt(recipe)


def _needs_modelopt(recipe: Recipe) -> None:
    if recipe.algorithm != "max":
        raise OctavoError(
            f"calibration algorithm '{recipe.algorithm}' needs NVIDIA ModelOpt, which calibrates "
            "on the CPU only; install it with 'pip install nvidia-modelopt' or use 'max'."
        )


def _carrying(states: Sequence[Tensor], outputs: list[Tensor]) -> Callable[[torch.nn.Module], None]:
    """Show a block `states` and keep what comes out the first time.

    ModelOpt only watches in that pass: it is FP32. An algorithm may ask for more of them.
    """

    def run(module: torch.nn.Module) -> None:
        found = [module(x) for x in states]
        if not outputs:
            outputs.extend(found)

    return run


def _each(
    reference: ReferenceEncoder,
    batches: Sequence[Tensor],
    progress: Callable[[int, int], None] | None,
) -> Callable[[torch.nn.Module], None]:
    def run(module: torch.nn.Module) -> None:
        for done, embeds in enumerate(batches, 1):
            module(embeds)
            if progress:
                progress(done, len(batches))

    return run


def _modelopt_ranges(
    reference: ReferenceEncoder, recipe: Recipe, run: Callable[[torch.nn.Module], None]
) -> Calibration:
    """The ranges of `reference`, or of a block; `run(module)` shows it the prompts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "transformers not tested", "CUDA not available", ...
        _import_modelopt()
        import modelopt
        import modelopt.torch.quantization as mtq
        from modelopt.torch.quantization.nn import TensorQuantizer

        e4m3 = {"num_bits": (4, 3), "axis": None}
        # Linears only, later rules win. FP8_DEFAULT_CFG would quantize layer norm inputs too.
        config = {
            "quant_cfg": [
                {"quantizer_name": "*", "enable": False},
                {"quantizer_name": "*weight_quantizer", "parent_class": "nn.Linear", "cfg": e4m3},
                {"quantizer_name": "*input_quantizer", "parent_class": "nn.Linear", "cfg": e4m3},
            ],
            "algorithm": None,  # calibrated below: replacing the modules prints, and must not
        }
        with torch.no_grad():  # not inference_mode: its tensors would stay inference tensors
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    mtq.quantize(reference, config)
                mtq.calibrate(reference, recipe.algorithm, run)
            except AssertionError as error:
                raise QuantizationError(f"ModelOpt refused the ranges: {error}.") from error
    amax = {
        name: module.amax
        for name, module in reference.named_modules()
        if isinstance(module, TensorQuantizer) and module.is_enabled
    }
    inputs = {
        name.removesuffix(".input_quantizer"): value.detach().float()
        for name, value in amax.items()
        if name.endswith(".input_quantizer") and value is not None
    }
    weights = None
    if recipe.algorithm != "max":
        weights = {
            name.removesuffix(".weight_quantizer"): value.detach().float()
            for name, value in amax.items()
            if name.endswith(".weight_quantizer") and value is not None
        }
    return Calibration(inputs, weights, f"modelopt {modelopt.__version__} {recipe.algorithm}")


def _import_modelopt() -> None:
    """Import ModelOpt on a stack of its own; raises ImportError.

    PuLP, which it imports, keeps the ImportError of a solver that is missing, with it the whole
    stack that imported it, and with that the FP32 reference: 2.5 GB for CLIP-G, never freed.
    """
    failures: list[Exception] = []

    def load() -> None:
        try:
            importlib.import_module("modelopt.torch.quantization.nn")
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join()
    for error in failures:
        if isinstance(error, ImportError):
            raise error
        # it checks the versions of others at import, in its own ways
        raise ImportError(f"{type(error).__name__}: {error}") from error


def _checked(calibration: Calibration, spec: EncoderSpec) -> Calibration:
    for name in spec.linears():
        seen = calibration.input_amax.get(name)
        if seen is None:
            raise QuantizationError(
                f"{name}: calibration never reached this layer; nothing was written."
            )
        if not bool(torch.isfinite(seen)):
            raise QuantizationError(
                f"{name}: its input reached {seen.item()} on the calibration prompts, "
                "so the weights overflow even in FP32; check the file."
            )
    return calibration
