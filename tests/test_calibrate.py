# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Calibration by NVIDIA ModelOpt and by our own `max`: the same numbers, the same refusals."""

from __future__ import annotations

import importlib.util
import logging
import sys
from dataclasses import replace

import pytest
import torch
from octavo import calibrate as module
from octavo.backends.amax import AmaxRecorder
from octavo.backends.torch_ops import ReferenceEncoder, StreamedEncoder
from octavo.calibrate import Calibration, calibrate, has_modelopt
from octavo.checkpoints.quantized import scale_from_amax, to_fp8
from octavo.encoders import encode
from octavo.encoders.clip import FINAL_NORM, POSITIONS, TOKENS, ClipSpec
from octavo.errors import Cancelled, OctavoError, QuantizationError
from octavo.recipes import load_recipe
from octavo.seeded import CLIP_L, TINY
from samples import LAYER, embeds_of, random_embeds, tiny
from torch import Tensor

MAX = load_recipe("fp8")
MSE = MAX.with_options(algorithm="mse")
WIDE = replace(CLIP_L, layers=2, vocabulary=64)


def reference(spec: ClipSpec = TINY, **changed: Tensor) -> ReferenceEncoder:
    weights = {**tiny(spec), **changed}
    return ReferenceEncoder(spec, weights.__getitem__)


def batches(spec: ClipSpec = TINY) -> tuple[Tensor, ...]:
    if spec.vocabulary < 49408:
        return tuple(random_embeds(spec, 2, seed=seed) for seed in range(3))
    return embeds_of(spec, tiny(spec), 6, "calibration").split(2)


def test_modelopt_is_what_runs_by_default() -> None:
    assert has_modelopt()
    assert calibrate(reference(), batches(), MAX).method.startswith("modelopt 0.")
    assert calibrate(reference(), batches(), MAX, modelopt=False).method == "octavo max"


@pytest.mark.parametrize("spec", [TINY, WIDE], ids=["tiny", "L, 2 layers"])
def test_modelopts_max_is_our_max_exactly(spec: ClipSpec) -> None:
    theirs = calibrate(reference(spec), batches(spec), MAX, modelopt=True)
    ours = calibrate(reference(spec), batches(spec), MAX, modelopt=False)
    assert theirs.method != ours.method
    assert theirs.input_amax.keys() == ours.input_amax.keys() == spec.linears().keys()
    for name, amax in ours.input_amax.items():
        other = theirs.input_amax[name]
        assert (other.dtype, other.shape) == (amax.dtype, amax.shape) == (torch.float32, ())
        assert torch.equal(other, amax), name
    assert theirs.weight_amax is ours.weight_amax is None


def test_max_is_the_largest_magnitude_over_all_batches() -> None:
    seen: dict[str, list[float]] = {}

    def observe(name: str, x: Tensor) -> None:
        seen.setdefault(name, []).append(x.abs().max().item())

    for embeds in batches():
        encode(reference().ops(observe), TINY, embeds)
    amax = calibrate(reference(), batches(), MAX, modelopt=False).input_amax
    assert {name: max(values) for name, values in seen.items()} == {
        name: value.item() for name, value in amax.items()
    }
    # the test tells one batch from another, and either sign from the other
    assert any(max(v) != v[-1] for v in seen.values())
    assert any(max(v) != v[0] for v in seen.values())


def test_q_k_and_v_share_one_range() -> None:
    amax = calibrate(reference(), batches(), MAX).input_amax
    for i in range(TINY.layers):
        assert len({amax[f"{TINY.block(i)}self_attn.{n}_proj"].item() for n in "qkv"}) == 1


def test_a_streamed_reference_gives_the_same() -> None:
    streamed = StreamedEncoder(TINY, tiny().__getitem__, "cpu")
    found = calibrate(streamed, batches(), MAX)
    assert found.method == "octavo max"
    assert found.input_amax == calibrate(reference(), batches(), MAX).input_amax
    with pytest.raises(OctavoError, match=r"'mse' needs NVIDIA ModelOpt, .* on the CPU"):
        calibrate(streamed, batches(), MSE)


@pytest.mark.parametrize("modelopt", [True, False])
def test_weights_stay_as_they_are_and_norms_unquantized(modelopt: bool) -> None:
    encoder = reference()
    calibrate(encoder, batches(), MAX, modelopt=modelopt)
    state = encoder.state_dict()
    for name in TINY.tensors().keys() - {TOKENS}:
        assert torch.equal(state[name], tiny()[name].float()), name
    quantizers = [n for n, m in encoder.named_modules() if "quantizer" in n and m.is_enabled]
    expected = {f"{n}.{k}_quantizer" for n in TINY.linears() for k in ("input", "weight")}
    assert set(quantizers) == (expected if modelopt else set())
    assert not any("norm" in n or FINAL_NORM in n or POSITIONS in n for n in quantizers)


def test_mse_searches_the_weights_and_leaves_the_inputs() -> None:
    ranges = calibrate(reference(), batches(), MSE)
    assert ranges.method.endswith(" mse")
    assert ranges.weight_amax is not None
    assert ranges.weight_amax.keys() == TINY.linears().keys()
    largest = {name: tiny()[name + ".weight"].float().abs().max() for name in TINY.linears()}
    changed = [n for n, amax in ranges.weight_amax.items() if amax != largest[n]]
    assert changed

    def error(name: str, amax: Tensor) -> float:
        weight, scale = tiny()[name + ".weight"].float(), scale_from_amax(amax, name)
        return float((to_fp8(weight, scale).float() * scale - weight).square().mean())

    for name, amax in ranges.weight_amax.items():
        assert amax.shape == ()
        assert error(name, amax) <= error(name, largest[name])
    assert any(error(n, ranges.weight_amax[n]) < 0.99 * error(n, largest[n]) for n in changed)
    assert ranges.input_amax == calibrate(reference(), batches(), MAX).input_amax


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """Standard output belongs to the command line's --json."""
    for recipe in (MAX, MSE):
        calibrate(reference(), batches(), recipe)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("modelopt", [True, False])
def test_progress_counts_batches_and_may_cancel(modelopt: bool) -> None:
    steps: list[tuple[int, int]] = []
    calibrate(
        reference(), batches(), MAX, modelopt=modelopt, progress=lambda d, t: steps.append((d, t))
    )
    assert steps == [(1, 3), (2, 3), (3, 3)]

    def cancel(done: int, _total: int) -> None:
        steps.append((done, 0))
        if done == 2:
            raise Cancelled("by the user")

    steps.clear()
    with pytest.raises(Cancelled):
        calibrate(reference(), batches(), MAX, modelopt=modelopt, progress=cancel)
    assert steps == [(1, 0), (2, 0)]


def broken(kind: str) -> ReferenceEncoder:
    name = LAYER + "mlp.fc1.weight"
    weight = tiny()[name].float()
    weight[3, 5] = {"nan": torch.nan, "inf": torch.inf, "huge": 3e38}[kind]
    if kind == "huge":  # finite, and overflows as soon as it is used
        weight[:] = 3e38
    return reference(**{name: weight})


@pytest.mark.parametrize("modelopt", [True, False])
@pytest.mark.parametrize("kind", ["nan", "inf", "huge"])
def test_nan_and_infinite_ranges_are_refused(kind: str, modelopt: bool) -> None:
    with pytest.raises(QuantizationError, match=r"reached (nan|inf)|refused the ranges"):
        calibrate(broken(kind), batches(), MAX, modelopt=modelopt)


def test_a_nan_early_is_not_forgotten() -> None:
    recorder = AmaxRecorder()
    recorder("x", torch.tensor([1.0, torch.nan]))
    recorder("x", torch.tensor([5.0]))
    assert recorder.amax["x"].isnan()


@pytest.mark.parametrize("modelopt", [True, False])
def test_a_layer_that_was_never_reached_is_refused(modelopt: bool) -> None:
    with pytest.raises(QuantizationError, match=r"q_proj: calibration never reached this layer"):
        calibrate(reference(), [], MAX, modelopt=modelopt)

    class Shallow(ReferenceEncoder):
        """Skips its last block."""

        def forward(self, embeds: Tensor, mask: Tensor | None = None):
            return encode(self.ops(), replace(self.spec, layers=1), embeds, mask)

    if modelopt:
        encoder = Shallow(TINY, tiny().__getitem__)
        with pytest.raises(QuantizationError, match=r"layers\.1\.self_attn\.q_proj: .*never"):
            calibrate(encoder, batches(), MAX, modelopt=True)


def without_modelopt(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "not installed":
        found = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda n, *a: None if n == "modelopt" else found(n, *a)
        )
    for name in [n for n in sys.modules if n.partition(".")[0] == "modelopt"]:
        monkeypatch.delitem(sys.modules, name)
    if how == "a dependency is missing":
        monkeypatch.setitem(sys.modules, "modelopt.torch", None)
    else:
        monkeypatch.setitem(sys.modules, "modelopt", None)
    if how == "it raises at import":

        class Raises:
            def find_spec(self, name: str, *_: object) -> None:
                if name == "modelopt":
                    raise RuntimeError("torch 1.0 is too old")

        monkeypatch.delitem(sys.modules, "modelopt")
        monkeypatch.setattr(sys, "meta_path", [Raises(), *sys.meta_path])
        monkeypatch.setattr(module, "has_modelopt", lambda: True)


HOWS = ["not installed", "a dependency is missing", "it raises at import"]


@pytest.mark.parametrize("how", HOWS)
def test_without_modelopt(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = calibrate(reference(), batches(), MAX, modelopt=False)
    without_modelopt(monkeypatch, how)
    with caplog.at_level(logging.WARNING):
        found = calibrate(reference(), batches(), MAX)
    assert found.method == "octavo max"
    assert found.input_amax == expected.input_amax
    told = [r for r in caplog.records if "ModelOpt cannot be imported" in r.getMessage()]
    assert bool(told) == (how != "not installed")
    for recipe, demanded in ((MSE, None), (MAX, True), (MSE, True)):
        with pytest.raises(OctavoError, match="pip install nvidia-modelopt"):
            calibrate(reference(), batches(), recipe, modelopt=demanded)


def test_the_recorder_keeps_scalars_of_the_past() -> None:
    recorder = AmaxRecorder()
    x = torch.tensor([[-3.0, 2.0]], dtype=torch.float16)
    recorder("a", x)
    x.fill_(0)
    recorder("a", x)
    recorder("b", torch.zeros(2))
    assert {n: (v.item(), v.dtype, v.shape) for n, v in recorder.amax.items()} == {
        "a": (3.0, torch.float32, ()),
        "b": (0.0, torch.float32, ()),
    }


def test_all_ranges_must_be_there() -> None:
    amax = {name: torch.ones(()) for name in TINY.linears()}
    assert module._checked(Calibration(amax, None, "x"), TINY).input_amax == amax
    del amax[LAYER + "mlp.fc2"]
    with pytest.raises(QuantizationError, match=r"mlp\.fc2"):
        module._checked(Calibration(amax, None, "x"), TINY)
