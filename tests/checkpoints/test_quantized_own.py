# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint made of an FP8 file has the file's own codes and scales, bit by bit."""

from dataclasses import replace

import fp8_files as f
import packagings as p
import pytest
import torch
from octavo.checkpoints import detect, fingerprint
from octavo.checkpoints.quantized import check_scales, metadata, open_quantized, quantized_tensors
from octavo.errors import FileError, QuantizationError
from safetensors.torch import save_file

E4M3 = torch.float8_e4m3fn
KINDS = {"T5": (p.t5_canonical, p.SMALL_T5), "CLIP": (p.canonical, p.SMALL)}


def made(weights, amax, **structure):
    linears = dict.fromkeys(weights.spec.linears(), "fp8") | structure
    tensors = quantized_tensors(
        weights.spec, weights.read, linears, amax, quantized=weights.quantized
    )
    return linears, tensors


def sharing(spec):
    """All linears, those together that share an input."""
    return [names for i in range(spec.layers) for names in spec.groups(i)]


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inputs", [True, False])
@pytest.mark.parametrize("name", ["legacy", "plain"])
def test_codes_and_scales_are_the_files_own(name, inputs, kind, tmp_path):
    make, spec = KINDS[kind]
    c = f.coded(make(), spec.linears(), inputs=inputs and name != "plain")
    if c.input_scales:
        for names in sharing(spec):
            c.input_scales.update(dict.fromkeys(names, c.input_scales[names[0]]))
    if name == "plain":
        c = f.Codes(c.codes, {}, {}, c.rest)
    tensors = f.legacy(c) if name == "legacy" else f.without_notes(c)
    (weights,) = detect(p.write(tmp_path / "x.safetensors", tensors)).encoders
    amax = {} if c.input_scales else dict.fromkeys(spec.linears(), torch.tensor(448 * 0.25))
    structure, found = made(weights, amax)
    for linear, codes in c.codes.items():
        assert found[linear + ".weight"].dtype == E4M3
        assert torch.equal(bits(found[linear + ".weight"]), bits(codes))
        assert found[linear + ".weight_scale"].item() == c.weight_scales.get(linear, 1.0)
        assert found[linear + ".input_scale"].item() == c.input_scales.get(linear, 0.25)
    for rest, tensor in c.rest.items():
        assert torch.equal(found.get(rest, tensor), tensor), rest

    facts = {"spec": spec.facts(), "structure": structure, "body": "bfloat16"}
    save_file(dict(found), tmp_path / "c.safetensors", metadata(facts))
    checkpoint = open_quantized(tmp_path / "c.safetensors")
    check_scales(checkpoint)
    assert checkpoint.spec == spec
    for linear in spec.linears():
        read = weights.read(linear + ".weight")
        assert torch.equal(checkpoint.dense(linear + ".weight"), read)
    detected = detect(tmp_path / "c.safetensors")
    (again,) = detected.encoders
    assert detected.is_octavo and again.spec == spec and again.dtype == "fp8"
    if c.input_scales:  # the same codes and scales are the same encoder, whoever wrote them
        assert fingerprint(again).body == fingerprint(weights).body


@pytest.mark.parametrize("kind", KINDS)
def test_linears_that_share_an_input_have_the_largest_of_their_scales(kind, tmp_path):
    """One GEMM holds one, and whatever a smaller one holds the largest holds too."""
    make, spec = KINDS[kind]
    c = f.coded(make(), spec.linears())
    first, *_, last = sharing(spec)[0]
    del c.input_scales[last]  # calibrated: 0.5, the largest of the three
    (weights,) = detect(p.write(tmp_path / "x.safetensors", f.comfy_quant(c))).encoders
    _, found = made(weights, {last: torch.tensor(448 * 0.5)})
    own = {last: 0.5, **c.input_scales}
    assert len({own[n] for n in sharing(spec)[0]}) > 1
    for names in sharing(spec):
        scales = {found[n + ".input_scale"].item() for n in names}
        assert scales == {max(own[n] for n in names)}
    _, apart = made(weights, {}, **{last: "16bit"})  # which is no part of that GEMM
    assert apart[first + ".input_scale"].item() < 0.5


def test_a_missing_input_scale_is_never_made_up(tmp_path):
    c = f.coded(p.t5_canonical(), p.SMALL_T5.linears(), inputs=False)
    (weights,) = detect(p.write(tmp_path / "x.safetensors", f.legacy(c))).encoders
    with pytest.raises(QuantizationError, match="calibration never reached"):
        made(weights, {})


def test_linears_that_the_recipe_keeps_in_16_bit_are_dequantized(tmp_path):
    make, spec = KINDS["CLIP"]
    c = f.coded(make(), spec.linears())
    (weights,) = detect(p.write(tmp_path / "x.safetensors", f.comfy_quant(c))).encoders
    kept = spec.block(0) + "mlp.fc1"
    _, found = made(weights, {}, **{kept: "16bit"})
    values = f.decoded(c.codes[kept], c.weight_scales[kept])
    assert torch.equal(found[kept + ".weight"], values.half())
    assert kept + ".weight_scale" not in found


UNSOUND_T5 = [
    ("norm_eps", float("nan")),
    ("norm_eps", -1.0),
    ("norm_eps", "x"),
    ("norm_eps", 0),
    ("activation", "swish"),
    ("activation", ["relu"]),
    ("max_distance", 3),
    ("max_distance", 64.5),
    ("max_distance", True),
    ("max_distance", 10**400),
]


@pytest.mark.parametrize("max_distance", [128, 64])
def test_octavos_own_t5_tells_what_tensors_cannot(max_distance, tmp_path):
    spec = replace(p.SMALL_T5, activation="relu", max_distance=max_distance, norm_eps=1e-5)
    structure = dict.fromkeys(spec.linears(), "16bit")
    facts = {"spec": spec.facts(), "structure": structure, "body": "bfloat16"}
    path = tmp_path / "x.safetensors"
    save_file(p.t5_canonical(), path, metadata(facts))
    assert open_quantized(path).spec == spec
    (weights,) = detect(path).encoders
    assert (weights.spec, weights.dtype) == (spec, "fp16")
    for fact, value in UNSOUND_T5:
        said = {**facts, "spec": {**spec.facts(), fact: value}}
        save_file(p.t5_canonical(), path, metadata(said))
        assert detect(path).encoders[0].spec == p.SMALL_T5  # by rule
        with pytest.raises(FileError, match="unreadable Octavo metadata"):
            open_quantized(path)
    fp16 = metadata({**facts, "body": "float16"})  # which T5 overflows
    save_file(p.t5_canonical(), path, fp16)
    with pytest.raises(FileError, match="unreadable Octavo metadata"):
        open_quantized(path)
    lying = {**facts, "spec": {**spec.facts(), "layers": 4}}  # not these tensors': not believed
    save_file(p.t5_canonical(), path, metadata(lying))
    assert detect(path).encoders[0].spec == p.SMALL_T5
