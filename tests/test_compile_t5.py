# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The whole job for a T5 file: recognise, calibrate by blocks, quantize, verify, compile, cache."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from octavo import prompts
from octavo.backends.torch_ops import ReferenceEncoder
from octavo.checkpoints import detect
from octavo.checkpoints.quantized import QuantizedTensors, open_quantized, quantized_tensors
from octavo.checkpoints.writing import write_safetensors
from octavo.compile import (
    T5_SAMPLE,
    Progress,
    checkpoint_key,
    engine_tensors,
    fingerprint_of,
    make_checkpoint,
    plan_key,
    sample,
    verify,
)
from octavo.encoders import T5Spec
from octavo.engine_cache import EngineCache
from octavo.errors import (
    CacheError,
    FileError,
    OctavoBug,
    QuantizationError,
    SimilarityError,
)
from octavo.recipes import load_recipe
from octavo.seeded import T5_TINY, T5_XXL, UMT5_XXL, seeded_tensors
from pipeline import Recorder, artifacts, build, one_thread, save  # noqa: F401 - a fixture
from torch import Tensor

SPEC = replace(T5_TINY, width=256, feed_forward=512, heads=4, vocabulary=2000)
FP8 = load_recipe("fp8")


def tensors_of(spec: T5Spec = SPEC, **options) -> dict[str, Tensor]:
    """Without outlier channels: at this width they cost FP8 more than its floor allows."""
    return dict(seeded_tensors(spec, **{"outliers": False, **options}))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory):
    """(model, cache, what the job said, its result), made once."""
    folder = tmp_path_factory.mktemp("t5")
    model, report = save(folder / "t5.safetensors", tensors_of()), Recorder()
    return model, folder / "cache", report, build(model, cache=folder / "cache", report=report)


def test_a_t5_file_becomes_a_verified_plan(built) -> None:
    _, cache, report, result = built
    (encoder,) = result.encoders
    facts = encoder.facts()
    assert (facts["family"], facts["layers"], facts["positions"]) == ("t5", 2, 1024)
    assert facts["similarity"]["token_mean"] > 0.998
    assert facts["similarity"]["token_min"] > 0.99
    assert facts["similarity"]["pooled"] is None
    assert encoder.similarity["judge"].startswith("onnxruntime")
    assert len(artifacts(cache, "plans")) == len(artifacts(cache, "checkpoints")) == 1
    assert report.phases[:5] == [
        "reading", "running the FP32 reference", "calibrating", "quantizing", "verifying the graph",
    ]  # fmt: skip
    for phase in ("running the FP32 reference", "calibrating", "verifying the graph"):
        steps = [(e.done, e.total) for e in report.events if e.phase == phase]
        assert steps == [(1, 2), (2, 2)], phase  # blocks
    layers = json.loads(artifacts(cache, "plans")[0].with_suffix(".json").read_text())["facts"]
    assert layers["layers"] == {"fp8_gemms": 8, "other_gemms": 0, "attentions": 2}


def test_the_checkpoint_holds_what_it_should(built) -> None:
    _, cache, _, _ = built
    checkpoint = open_quantized(artifacts(cache, "checkpoints")[0])
    assert checkpoint.spec == SPEC
    assert set(checkpoint.structure.values()) == {"fp8"}
    assert checkpoint.facts["body"] == "bfloat16"
    calibration = checkpoint.facts["calibration"]
    assert calibration["set"] == prompts.set_id("calibration", "t5")
    assert calibration["method"].startswith("modelopt")
    kinds: dict[str, set[torch.dtype]] = {}
    for name in checkpoint.names:
        kinds.setdefault(name.rsplit(".", 1)[1], set()).add(checkpoint.read(name).dtype)
    untouched = [SPEC.token_table, *SPEC.bias_tables(), *(n + ".weight" for n in SPEC.norms())]
    source = tensors_of()
    for name in untouched:  # embeddings, norms, relative bias: never quantized
        assert torch.equal(checkpoint.read(name), source[name]), name
    assert kinds["weight_scale"] == kinds["input_scale"] == {torch.float32}
    held = engine_tensors(SPEC, checkpoint.structure)
    assert SPEC.token_table not in held
    assert set(held) <= checkpoint.names


def test_the_second_time_nothing_is_made(built) -> None:
    model, cache, _, result = built
    report = Recorder()
    again = build(model, cache=cache, report=report)
    assert set(report.phases) <= {"reading"}  # a file this young is hashed again
    assert again.encoders[0].checkpoint_cached and again.encoders[0].engines[0].cached
    assert again.encoders[0].engines[0].key == result.encoders[0].engines[0].key


def test_a_checkpoint_is_a_model_file_too(built, tmp_path: Path) -> None:
    """What Octavo wrote is recognised, and serves without calibration, bit for bit."""
    _, cache, _, result = built
    (stored,) = artifacts(cache, "checkpoints")
    report = Recorder()
    again = build(stored, cache=tmp_path / "cache", report=report)
    assert "calibrating" not in report.phases and "quantizing" not in report.phases
    assert artifacts(tmp_path / "cache", "checkpoints")[0].read_bytes() == stored.read_bytes()
    assert again.encoders[0].noted and not result.encoders[0].noted  # measured then, not now
    assert again.encoders[0].engines[0].key == result.encoders[0].engines[0].key


def test_verify_takes_every_prompt(built) -> None:
    model, cache, _, _ = built
    (found,) = verify(model, recipe=FP8.with_options(prompts=8), cache=EngineCache(cache))
    assert found.similarity["prompts"] == len(prompts.load_tokens("held_out", "t5")) == 48
    assert found.shortfall is None
    assert found.facts()["floor"] == asdict(FP8.of(SPEC).floor)  # T5's own


@pytest.mark.parametrize("recipe", ["fp8", "fp8-mixed", "bf16"])
def test_an_embedded_plan_needs_no_weights(recipe: str, tmp_path: Path) -> None:
    model = save(tmp_path / "t5.safetensors", tensors_of())
    shared = build(model, cache=tmp_path / "cache", recipe=recipe)
    embedded = build(model, cache=tmp_path / "cache", recipe=recipe, embed_weights=True, mask=True)
    one, other = (r.encoders[0].engines[0] for r in (shared, embedded))
    assert (one.weights, other.weights) == ("shared", "embedded")
    held = 2 * 256 * (4 * 256 + 3 * 512)  # bytes in FP8
    assert other.bytes - one.bytes > 0.8 * held
    gemms = {"fp8": (8, 0), "fp8-mixed": (6, 2), "bf16": (0, 8)}[recipe]
    plan = json.loads(Path(one.path).with_suffix(".json").read_text())["facts"]["layers"]
    assert (plan["fp8_gemms"], plan["other_gemms"]) == gemms
    checkpoint = open_quantized(shared.encoders[0].checkpoint.path)
    kept = [n for n, kind in checkpoint.structure.items() if kind == "16bit"]
    assert len(kept) == {"fp8": 0, "fp8-mixed": 2, "bf16": 14}[recipe]
    # As every engine wants them, so that an embedded plan takes them from the file.
    assert {checkpoint.read(n + ".weight").dtype for n in kept} <= {torch.bfloat16}


def test_outliers_that_cost_too_much_are_refused(tmp_path: Path) -> None:
    model = save(tmp_path / "t5.safetensors", tensors_of(outliers=True))
    with pytest.raises(SimilarityError, match=r"under the floor 0\.99.*try --recipe fp8-mixed"):
        build(model, cache=tmp_path / "cache")
    assert artifacts(tmp_path / "cache", "plans") == []
    result = build(model, cache=tmp_path / "cache", recipe="bf16")
    assert result.encoders[0].similarity["token_min"] > 0.998


def test_activations_beyond_fp16(tmp_path: Path) -> None:
    """The residual stream and the input of `wo` pass 65504; the result stays as near to FP32."""
    spec = replace(SPEC, width=768, heads=12)
    found = []
    for overflow in (False, True):
        model = save(tmp_path / f"{overflow}.safetensors", tensors_of(spec, overflow=overflow))
        result = build(model, cache=tmp_path / "cache")
        found.append(result.encoders[0].similarity)
        scales = open_quantized(result.encoders[0].checkpoint.path)
        wo = scales.read("encoder.block.1.layer.1.DenseReluDense.wo.input_scale")
        found[-1]["largest"] = float(wo) * 448
    assert found[1]["largest"] == pytest.approx(4096 * found[0]["largest"], rel=1e-3)
    assert found[1]["token_mean"] == pytest.approx(found[0]["token_mean"], abs=2e-4)
    assert found[1]["token_min"] > 0.99


def scaled_fp8(tensors: dict[str, Tensor], inputs: bool) -> dict[str, Tensor]:
    """As ComfyUI's t5xxl_fp8_e4m3fn_scaled: codes and one scale per linear."""
    made: dict[str, Tensor] = {"scaled_fp8": torch.zeros(2 if not inputs else 0).to(
        torch.float8_e4m3fn)}  # fmt: skip
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if stem not in SPEC.linears():
            made[name] = tensor
            continue
        scale = tensor.float().abs().max() / 300  # not the one that we would choose
        made[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
        made[stem + ".scale_weight"] = scale
        if inputs:
            made[stem + ".scale_input"] = torch.tensor(0.03)
    return made


@pytest.mark.parametrize("inputs", [True, False])
def test_an_fp8_file_keeps_its_codes_and_scales(inputs: bool, tmp_path: Path) -> None:
    tensors = scaled_fp8(tensors_of(), inputs)
    model, report = save(tmp_path / "t5.safetensors", tensors), Recorder()
    result = build(model, cache=tmp_path / "cache", report=report)
    checkpoint = open_quantized(result.encoders[0].checkpoint.path)
    for linear in SPEC.linears():
        codes = checkpoint.read(linear + ".weight")
        assert torch.equal(codes.view(torch.uint8), tensors[linear + ".weight"].view(torch.uint8))
        assert checkpoint.read(linear + ".weight_scale") == tensors[linear + ".scale_weight"]
        given = checkpoint.read(linear + ".input_scale")
        assert (given == torch.tensor(0.03)) == inputs
    assert ("calibrating" in report.phases) is not inputs  # only what is missing
    assert checkpoint.facts["calibration"]["method"].startswith("none" if inputs else "modelopt")


def test_keys_tell_t5s_apart() -> None:
    structure = dict.fromkeys(T5_XXL.linears(), "fp8")

    def key(spec: T5Spec, mask: bool = False) -> str:
        return plan_key(spec, structure, "bfloat16", (89,), mask=mask).id

    keys = {
        key(spec, mask)
        for spec in (T5_XXL, UMT5_XXL, replace(T5_XXL, activation="relu"))
        for mask in (False, True)
    }
    assert len(keys) == 3  # a T5's plan always has a mask: the one that is looked for at run time
    assert key(replace(T5_XXL, vocabulary=32100)) in keys  # which changes nothing in the graph
    assert T5_XXL.longest == 1024


def test_a_checkpoints_key_holds_t5s_rules() -> None:
    from octavo.checkpoints import Fingerprint

    content = Fingerprint("0" * 64, None)
    one = checkpoint_key(T5_XXL, content, FP8)
    assert one == checkpoint_key(T5_XXL, content, FP8.of(T5_XXL))
    assert one.calibration == f"{prompts.set_id('calibration', 't5')}:64"
    assert checkpoint_key(T5_XXL, content, FP8.with_options(prompts=9)).calibration.endswith(":9")


def test_held_out_prompts_are_t5s() -> None:
    tensors = tensors_of()
    found = sample(SPEC, tensors.__getitem__, False, 5)
    assert found.embeds.shape == (5, T5_SAMPLE, SPEC.width) and found.projection is None
    assert found.rows[0] == [1] + [0] * (T5_SAMPLE - 1)  # the empty prompt
    assert max(map(max, found.rows)) < SPEC.vocabulary
    assert torch.equal(found.embeds[0, 0], tensors[SPEC.token_table][1].float())


def test_tensors_made_when_asked_for_are_the_same_file() -> None:
    tensors, amax = tensors_of(), dict.fromkeys(SPEC.linears(), torch.tensor(3.0))
    structure = load_recipe("fp8-mixed").of(SPEC).structure(SPEC.linears())
    asked: list[str] = []

    def read(name: str) -> Tensor:
        asked.append(name)
        return tensors[name]

    lazy = QuantizedTensors(SPEC, read, structure, amax)
    assert asked == []
    eager = quantized_tensors(SPEC, tensors.__getitem__, structure, amax)
    assert list(lazy) == list(eager) and len(lazy) == len(eager)
    for name, tensor in eager.items():
        assert lazy.type(name) == (tensor.dtype, tuple(tensor.shape))
    one, other = io.BytesIO(), io.BytesIO()
    write_safetensors(one, eager, {"a": "b"})
    write_safetensors(other, lazy, {"a": "b"}, lazy.type)
    assert one.getvalue() == other.getvalue()


def test_a_tensor_that_changes_its_type_is_not_written() -> None:
    tensors = {"a": torch.zeros(3)}
    with pytest.raises(OctavoBug, match="a is no longer"):
        write_safetensors(io.BytesIO(), tensors, {}, lambda name: (torch.float16, (3,)))


def test_a_file_that_changes_during_the_job_is_not_stored(tmp_path: Path) -> None:
    model = save(tmp_path / "t5.safetensors", tensors_of())

    def change(event) -> None:
        if event.phase == "calibrating" and event.done == 1:
            changed = tensors_of()
            changed[SPEC.token_table][0, 0] += 1
            save(model, changed)

    with pytest.raises(FileError, match="changed while it was being"):
        build(model, cache=tmp_path / "cache", report=change)
    assert artifacts(tmp_path / "cache", "checkpoints") == []


def test_live_weights_that_change_as_they_are_written_are_not_stored(tmp_path: Path) -> None:
    """T5's tensors are read once more for the file, after everything was measured."""
    tensors = tensors_of()

    class Live:
        name, spec, projection_shape = "live", SPEC, None
        read = staticmethod(tensors.__getitem__)

    def change(event: Progress) -> None:
        if event.phase == "writing the FP8 checkpoint":
            tensors["encoder.block.1.layer.1.DenseReluDense.wo.weight"].mul_(2)

    content, cache = fingerprint_of(Live()), EngineCache(tmp_path)
    with pytest.raises(FileError, match="live: changed while it was being quantized"):
        make_checkpoint(Live(), content, FP8.with_options(prompts=8), cache, change)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_disk_without_room_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, report = save(tmp_path / "t5.safetensors", tensors_of()), Recorder()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2_000_000))
    with pytest.raises(CacheError, match=r"full: 2\.0 of the 2\.3 MB needed are left; free some"):
        build(model, cache=tmp_path / "cache", report=report)
    assert report.phases == ["reading"]
    assert list((tmp_path / "cache" / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("kept", [".q", ".k", "0.SelfAttention.o"])
def test_an_fp8_file_of_some_linears(kept: str, tmp_path: Path) -> None:
    """The rest is quantized; q, k and v, which are one GEMM, get along all the same."""
    source = tensors_of()
    part = {n: t for n, t in source.items() if n.removesuffix(".weight").endswith(kept)}
    tensors = {**source, **scaled_fp8(part, inputs=True)}
    result = build(save(tmp_path / "t5.safetensors", tensors), cache=tmp_path / "cache")
    checkpoint = open_quantized(result.encoders[0].checkpoint.path)
    for name in part:
        stem = name.removesuffix(".weight")
        assert torch.equal(checkpoint.read(name).view(torch.uint8), tensors[name].view(torch.uint8))
        assert checkpoint.read(stem + ".weight_scale") == tensors[stem + ".scale_weight"]
        assert checkpoint.read(stem + ".input_scale") >= tensors[stem + ".scale_input"]
    assert not result.encoders[0].noted


@pytest.mark.parametrize("vocabulary", [1, 2])
def test_a_token_table_without_the_end_token(vocabulary: int, tmp_path: Path) -> None:
    model = save(tmp_path / "t5.safetensors", tensors_of(replace(SPEC, vocabulary=vocabulary)))
    if vocabulary == 2:
        assert build(model, cache=tmp_path / "cache").encoders
        return
    with pytest.raises(QuantizationError, match="t5: it has embeddings for 1 tokens where at l"):
        build(model, cache=tmp_path / "cache")


@pytest.mark.parametrize("inputs", [True, False])
def test_scales_that_overflow_fp32_are_told_as_what_they_are(inputs: bool, tmp_path: Path) -> None:
    tensors = scaled_fp8(tensors_of(), inputs)
    for name in [n for n in tensors if n.endswith((".q.scale_weight", ".k.scale_weight"))]:
        tensors[name] = torch.tensor(1e30)
    model = save(tmp_path / "t5.safetensors", tensors)
    with pytest.raises(QuantizationError, match=r"t5: its weights overflow even in FP32 .* scales"):
        build(model, cache=tmp_path / "cache")


def test_the_reference_of_the_job_is_the_whole_encoders(built) -> None:
    """What is noted as similarity comes from states that the module gives too."""
    model, cache, _, result = built
    (encoder,) = detect(model).encoders
    held_out = sample(SPEC, encoder.read, False)
    with torch.no_grad():
        _, expected = ReferenceEncoder(SPEC, encoder.read)(held_out.embeds)
    checkpoint = open_quantized(artifacts(cache, "checkpoints")[0])
    from octavo.verify import States, graph_by_blocks, measure

    got = graph_by_blocks(
        SPEC, checkpoint.structure, checkpoint.read, "bfloat16", held_out.embeds
    ).bfloat16()
    found = measure(States(expected, None, None), States(got, None, None))
    assert found.token_mean == pytest.approx(result.encoders[0].similarity["token_mean"], abs=1e-7)
