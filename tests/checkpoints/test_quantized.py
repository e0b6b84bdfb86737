# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The FP8 checkpoint: ComfyUI's layout to the byte, its arithmetic, and what is refused."""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from octavo.checkpoints import FileIdentity, open_weights
from octavo.checkpoints.quantized import (
    COMFY_FORMAT,
    FP8_MAX,
    SCHEMA,
    metadata,
    open_quantized,
    quantized_tensors,
    scale_from_amax,
    storage,
    to_fp8,
)
from octavo.encoders.clip import POSITIONS, PROJECTION, TOKENS
from octavo.errors import FileError, QuantizationError
from octavo.recipes import load_recipe
from octavo.seeded import TINY
from safetensors import safe_open
from safetensors.torch import save_file
from samples import (
    LAYER,
    Quantized,
    clip_l,
    quantize,
    quantized_clip_l,
    quantized_tiny,
    tiny,
    tiny_ranges,
    weights_of,
)
from torch import Tensor

FC1 = LAYER + "mlp.fc1"
E4M3 = torch.float8_e4m3fn
E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
FINITE = E4M3_VALUES[~E4M3_VALUES.isnan()].unique()  # sorted


def nearest_code(x: Tensor) -> Tensor:
    """By search, not by cast: the closest E4M3 value, the even code at a tie, 448 beyond it."""
    x = x.double().clamp(-448, 448)
    distances = (x[..., None] - FINITE.double()).abs()
    least = distances.min(-1, keepdim=True).values
    candidates = torch.where(distances == least, FINITE.double(), torch.nan)
    low = torch.where(candidates.isnan(), torch.inf, candidates).min(-1).values
    high = torch.where(candidates.isnan(), -torch.inf, candidates).max(-1).values
    low_code = low.float().to(E4M3).view(torch.uint8)
    return torch.where(low_code % 2 == 0, low, high).float()


def test_to_fp8_rounds_to_nearest_even_and_saturates() -> None:
    ties = (FINITE[1:] + FINITE[:-1]) / 2
    special = torch.tensor([0.0, 448, 449, 464, 465, 1e6, -1e6, torch.inf, -torch.inf, 2**-10])
    drawn = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * 40
    x = torch.cat([FINITE, ties, ties * 1.0000001, special, drawn, drawn * 1e-4])
    for scale in (1.0, 0.25, 0.037):
        s = torch.tensor(scale)
        codes = to_fp8(x * s, s)
        assert codes.dtype == E4M3
        assert torch.equal(codes.float(), nearest_code((x * s) / s)), scale
    assert to_fp8(torch.tensor([torch.nan]), torch.ones(())).float().isnan().all()


def test_to_fp8_divides_in_float32_and_leaves_its_input_alone() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    before, scale = x.clone(), torch.tensor(0.0123)
    codes = to_fp8(x, scale)
    assert torch.equal(x, before)
    half = x.half()
    assert torch.equal(to_fp8(half, scale).float(), nearest_code(half.float() / scale))
    wrong = (half / scale.half()).to(E4M3).float()
    assert not torch.equal(wrong, codes.float())


def test_scales() -> None:
    assert scale_from_amax(torch.tensor(448.0), "x").item() == 1
    scale = scale_from_amax(torch.tensor(3.0, dtype=torch.float16), "x")
    assert (scale.dtype, scale.shape) == (torch.float32, ())
    assert scale.item() == np.float32(3) / np.float32(448)
    assert scale_from_amax(torch.zeros(1), "x").item() == 1.0
    assert scale_from_amax(torch.tensor(1e-45), "x").item() == 1.0  # underflows when divided


@pytest.mark.parametrize("amax", [torch.tensor(torch.nan), torch.tensor(torch.inf), None])
def test_unknown_ranges_are_never_shipped(amax: Tensor | None) -> None:
    with pytest.raises(QuantizationError, match=r"^some\.layer: "):
        scale_from_amax(amax, "some.layer")


@pytest.mark.parametrize("recipe", ["fp8", "fp8-mixed", "bf16"])
def test_names_dtypes_and_shapes(recipe: str) -> None:
    quantized = quantized_tiny(recipe)
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, shape in {**TINY.tensors(), PROJECTION: (128, 128)}.items():
        linear = name.removesuffix(".weight")
        if name.endswith(".weight") and quantized.structure.get(linear) == "fp8":
            expected[name] = (E4M3, shape)
            expected[linear + ".weight_scale"] = (torch.float32, ())
            expected[linear + ".input_scale"] = (torch.float32, ())
            expected[linear + ".comfy_quant"] = (torch.uint8, (27,))
        else:
            expected[name] = (torch.float16, shape)
    found = {name: (t.dtype, tuple(t.shape)) for name, t in quantized.tensors.items()}
    assert found == expected
    counts = {"fp8": 12, "fp8-mixed": 10, "bf16": 0}
    assert sum(dtype == E4M3 for dtype, _ in found.values()) == counts[recipe]


def test_comfy_quant_is_comfyuis_json_to_the_byte() -> None:
    for name, tensor in quantized_tiny().tensors.items():
        if name.endswith(".comfy_quant"):
            assert bytes(tensor.tolist()) == b'{"format": "float8_e4m3fn"}' == COMFY_FORMAT
            assert json.loads(bytes(tensor.tolist())) == {"format": "float8_e4m3fn"}


def test_scales_are_amax_over_448_and_weights_within_one_step() -> None:
    tensors, ranges = quantized_tiny().tensors, tiny_ranges()
    for linear in TINY.linears():
        weight = tiny()[linear + ".weight"].float()
        scale = tensors[linear + ".weight_scale"]
        assert scale == weight.abs().max() / 448
        assert tensors[linear + ".input_scale"] == ranges[linear] / 448
        codes = tensors[linear + ".weight"].float()
        assert codes.abs().max() == 448
        # half a step: 2^-4 of the value where normal, half of 2^-9 below
        bound = torch.maximum(codes.abs() * 2**-4, torch.tensor(2.0**-10)) * 1.0001
        assert ((codes - weight / scale).abs() <= bound).all()
        assert torch.equal(codes[:40], nearest_code(weight[:40] / scale))


def test_what_is_not_quantized_is_as_it_was() -> None:
    tensors = quantized_tiny("fp8-mixed").tensors
    kept = [n for n in tiny() if n in tensors and tensors[n].dtype != E4M3]
    assert LAYER + "self_attn.out_proj.weight" in kept and TOKENS in kept and PROJECTION in kept
    for name in kept:
        assert torch.equal(tensors[name], tiny()[name]), name
    assert PROJECTION not in quantized_tensors(
        TINY, tiny().__getitem__, load_recipe("fp8").structure(TINY.linears()), tiny_ranges()
    )


def changed(name: str, value: float | None) -> dict[str, Tensor]:
    tensor = tiny()[name].clone()
    if value is None:
        tensor.zero_()
    else:
        tensor.flatten()[-1] = value
    return {**tiny(), name: tensor}


def test_a_layer_of_zeros_has_scale_one() -> None:
    tensors = quantize(TINY, changed(FC1 + ".weight", None), tiny_ranges()).tensors
    assert tensors[FC1 + ".weight_scale"].item() == 1.0
    assert not tensors[FC1 + ".weight"].float().any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_are_refused(value: float) -> None:
    with pytest.raises(QuantizationError, match=r"mlp\.fc1\.weight: .*check the file"):
        quantize(TINY, changed(FC1 + ".weight", value), tiny_ranges())


def test_unknown_input_ranges_are_refused() -> None:
    ranges = {n: v for n, v in tiny_ranges().items() if n != FC1}
    with pytest.raises(QuantizationError, match=r"mlp\.fc1 \(input\): calibration never reached"):
        quantize(TINY, tiny(), ranges)
    quantize(TINY, tiny(), {}, "bf16")  # needs none


def test_searched_weight_ranges_are_used() -> None:
    structure = load_recipe("fp8").structure(TINY.linears())
    narrow = {n: tiny()[n + ".weight"].float().abs().max() / 2 for n in TINY.linears()}
    tensors = quantized_tensors(
        TINY, tiny().__getitem__, structure, tiny_ranges(), weight_amax=narrow
    )
    assert tensors[FC1 + ".weight_scale"] == narrow[FC1] / 448
    assert (tensors[FC1 + ".weight"].float().abs() == 448).sum() > 1  # clamped
    del narrow[FC1]
    with pytest.raises(QuantizationError, match=r"mlp\.fc1\.weight"):
        quantized_tensors(TINY, tiny().__getitem__, structure, tiny_ranges(), weight_amax=narrow)


FP16_MAX = 65504.0
STORED = {
    "exact in fp16": (torch.tensor([1.5, -2.0]), torch.float16),
    "fp16 subnormal": (torch.tensor([2.0**-24]), torch.float16),
    "exact in bf16 only": (torch.tensor([[1e20], [2.0**-60]]).bfloat16().float(), torch.bfloat16),
    "vector, exact in neither": (torch.tensor([1 + 2.0**-20]), torch.float32),
    "matrix, exact in neither": (torch.tensor([[1 + 2.0**-20]]), torch.float16),
    "matrix, at the end of fp16": (torch.tensor([[1 + 2.0**-20, FP16_MAX]]), torch.float16),
    "matrix, beyond fp16": (torch.tensor([[1 + 2.0**-20, 7e4]]), torch.bfloat16),
    "zeros": (torch.zeros(3, 3), torch.float16),
}


@pytest.mark.parametrize(("tensor", "dtype"), STORED.values(), ids=STORED)
def test_values_decide_how_a_tensor_is_stored(tensor: Tensor, dtype: torch.dtype) -> None:
    stored = storage(tensor)
    assert stored.dtype == dtype
    assert torch.equal(stored, tensor.to(dtype))


@pytest.mark.parametrize("first", [torch.float16, torch.bfloat16])
def test_the_dtype_of_the_file_does_not_decide(first: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    for std in (1.0, 1e-6, 1e-30):
        for shape in ((64,), (8, 8)):
            tensor = (torch.randn(*shape, generator=random) * std).to(first)
            known = storage(tensor)
            assert torch.equal(known.float(), tensor.float())  # exact
            for other in (torch.float32, torch.float64):
                again = storage(tensor.to(other))
                assert again.dtype == known.dtype and torch.equal(again, known)


def content(path: Path) -> tuple[str, str]:
    """(header, sha256 of the rest); safetensors writes the metadata's two keys in any order."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return json.dumps(header, sort_keys=True), hashlib.sha256(file.read()).hexdigest()


@pytest.mark.parametrize("recipe", ["fp8", "fp8-mixed", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_equal_values_in_any_dtype_give_the_same_file(
    tmp_path: Path, recipe: str, dtype: torch.dtype
) -> None:
    weights = weights_of(TINY, dtype=dtype)
    wide = {name: t.float() for name, t in weights.items()}
    for name, tensors in {"16": weights, "32": wide}.items():
        quantize(TINY, tensors, tiny_ranges(), recipe).save(tmp_path / name)
    assert content(tmp_path / "16") == content(tmp_path / "32")
    other = {**wide, FC1 + ".weight": wide[FC1 + ".weight"] * 1.5}
    quantize(TINY, other, tiny_ranges(), recipe).save(tmp_path / "other")
    assert content(tmp_path / "other")[1] != content(tmp_path / "16")[1]


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


FACTS = {
    "recipe": "fp8",
    "calibration": {"method": "octavo max", "prompts": 4, "set": "0123"},
    "similarity": {"token_mean": 0.995, "token_min": 0.98, "pooled": None},
    "source": {"key": "k", "body": "b", "projection": None},
}


@pytest.mark.parametrize("recipe", ["fp8", "fp8-mixed", "bf16"])
def test_round_trip(tmp_path: Path, recipe: str) -> None:
    quantized = quantized_tiny(recipe)
    path = tmp_path / "encoder.safetensors"
    checkpoint = quantized.save(path, **FACTS)
    assert checkpoint.path == path
    assert checkpoint.spec == TINY
    assert checkpoint.structure == quantized.structure
    assert checkpoint.projection
    assert {k: checkpoint.facts[k] for k in FACTS} == FACTS
    assert checkpoint.facts["schema"] == SCHEMA
    assert checkpoint.names == quantized.tensors.keys()
    for name, tensor in quantized.tensors.items():
        found = checkpoint.read(name)
        assert found.dtype == tensor.dtype
        assert found.shape == tensor.shape
        assert torch.equal(bits(found), bits(tensor)), name
    with pytest.raises(KeyError):
        checkpoint.read("nothing")
    without = {n: t for n, t in quantized.tensors.items() if n != PROJECTION}
    assert not replace(quantized, tensors=without).save(tmp_path / "without").projection


def test_dense_is_weight_times_scale(tmp_path: Path) -> None:
    checkpoint = quantized_tiny("fp8-mixed").save(tmp_path / "c")
    for name in (*TINY.tensors(), PROJECTION):
        dense = checkpoint.dense(name)
        assert dense.dtype == torch.float32
        source = tiny()[name].float()
        linear = name.removesuffix(".weight")
        if checkpoint.structure.get(linear) == "fp8" and name != linear:
            scale = checkpoint.read(linear + ".weight_scale")
            assert torch.equal(dense, checkpoint.read(name).float() * scale)
            assert 0 < (dense - source).norm() / source.norm() < 0.04
        else:
            assert torch.equal(dense, source), name


def test_metadata_is_one_json_string_beside_torchs_format(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    quantized_tiny().save(path, **FACTS)
    with safe_open(path, "pt") as file:
        found = file.metadata()
    assert found.keys() == {"format", "octavo"}
    assert found["format"] == "pt"
    facts = json.loads(found["octavo"])
    assert facts == {
        "schema": 1,
        "spec": {**TINY.facts()},
        "structure": load_recipe("fp8").structure(TINY.linears()),
        "body": "float16",
        **FACTS,
    }
    assert metadata({"b": 1, "a": 2}) == metadata({"a": 2, "b": 1})  # the same bytes in any order


def test_locations_point_at_the_very_bytes(tmp_path: Path) -> None:
    quantized = quantized_tiny("fp8-mixed")
    checkpoint = quantized.save(tmp_path / "c")
    locations = checkpoint.locations()
    assert locations.keys() == quantized.tensors.keys()
    with (
        checkpoint.path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        for name, tensor in quantized.tensors.items():
            offset, size = locations[name]
            assert data[offset : offset + size] == bits(tensor).numpy().tobytes(), name


@pytest.mark.slow
def test_size_of_clip_l_against_its_fp16_file(tmp_path: Path) -> None:
    checkpoint = quantized_clip_l().save(tmp_path / "fp8.safetensors")
    save_file(clip_l(), tmp_path / "fp16.safetensors")
    sizes = [(tmp_path / n).stat().st_size for n in ("fp8.safetensors", "fp16.safetensors")]
    assert sizes[0] <= 0.7 * sizes[1], sizes
    assert checkpoint.read(TOKENS).dtype == checkpoint.read(POSITIONS).dtype == torch.float16


# A file that goes or changes while it is open


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps an open file from being deleted")
@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_what_was_opened_is_what_is_read(tmp_path: Path, how: str) -> None:
    path = saved(tmp_path / "c.safetensors")
    checkpoint = open_quantized(path)
    if how == "deleted":
        path.unlink()
    else:
        other = saved(tmp_path / "other", **{FC1 + ".bias": torch.full((256,), 3.0)})
        os.replace(other, path)
    assert torch.equal(checkpoint.read(FC1 + ".bias"), quantized_tiny().tensors[FC1 + ".bias"])
    assert (
        checkpoint.read(FC1 + ".weight")
        .float()
        .equal(quantized_tiny().tensors[FC1 + ".weight"].float())
    )
    assert FC1 + ".weight" in checkpoint.locations()


@pytest.mark.parametrize("mapped", [False, True])
def test_a_file_that_is_written_to_is_not_touched_again(tmp_path: Path, mapped: bool) -> None:
    """A mapped page that is cut off would end the process."""
    path = saved(tmp_path / "c.safetensors")
    checkpoint = open_quantized(path)
    if mapped:
        checkpoint.read(FC1 + ".bias")
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(FileError, match=r"changed while it was being read; start again\.$"):
        checkpoint.read(FC1 + ".weight")
    with pytest.raises(FileError, match="changed"):
        checkpoint.check()


def test_another_file_than_the_one_that_was_verified(tmp_path: Path) -> None:
    path = saved(tmp_path / "c.safetensors")
    verified = FileIdentity.of(path)
    assert open_quantized(path, verified).spec == TINY
    os.utime(path, ns=(0, 0))
    with pytest.raises(FileError, match="changed"):
        open_quantized(path, verified)


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
def test_the_file_is_let_go_with_its_last_tensor(tmp_path: Path) -> None:
    path = saved(tmp_path / "c.safetensors")

    def is_open() -> bool:
        numbers = Path("/proc/self/fd").iterdir()
        return any(os.path.realpath(number) == str(path) for number in numbers)

    checkpoint = open_quantized(path)
    bias = checkpoint.read(FC1 + ".bias")
    del checkpoint
    assert is_open() and float(bias.float().sum()) == float(bias.float().sum())
    del bias
    assert not is_open()


def test_a_disk_that_cannot_map_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_quantized(saved(tmp_path / "c.safetensors"))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("octavo.checkpoints.quantized.mmap.mmap", refuse)
    with pytest.raises(FileError, match=r"cannot be mapped \(Cannot allocate memory\); free some"):
        checkpoint.read(FC1 + ".bias")


# What `open_quantized` refuses


def saved(path: Path, **changes: object) -> Path:
    """A checkpoint of TINY at `path`; `changes` to its facts, or to its tensors by name."""
    quantized = quantized_tiny()
    tensors, facts = dict(quantized.tensors), {**quantized_facts(quantized)}
    for name, value in changes.items():
        if "." not in name:
            facts[name] = value
        elif value is None:
            del tensors[name]
        else:
            tensors[name] = value
    facts = {name: value for name, value in facts.items() if value is not None}
    save_file(tensors, path, {**metadata({}), "octavo": json.dumps(facts)})
    return path


def quantized_facts(quantized: Quantized) -> dict[str, object]:
    spec, structure = quantized.spec.facts(), dict(quantized.structure)
    return {"schema": SCHEMA, "spec": spec, "structure": structure, "body": quantized.body}


def test_the_unchanged_file_opens(tmp_path: Path) -> None:
    assert open_quantized(saved(tmp_path / "c")).spec == TINY


def test_a_file_of_someone_else(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    save_file(tiny(), path, {"format": "pt"})
    with pytest.raises(FileError, match="not an FP8 checkpoint written by Octavo; make one with"):
        open_quantized(path)
    with pytest.raises(FileError):
        open_quantized(tmp_path / "absent.safetensors")


STRUCTURE = load_recipe("fp8").structure(TINY.linears())
BAD_FACTS = {
    "another schema": ({"schema": 2}, "checkpoint schema 2, not 1"),
    "no schema": ({"schema": None}, "unreadable"),
    "another family": ({"spec": {**TINY.facts(), "encoder": "bert"}}, "unknown family 'bert'"),
    "another family's fields": ({"spec": {**TINY.facts(), "encoder": "t5"}}, "unreadable"),
    "no spec": ({"spec": None}, "unreadable"),
    "a field too many": ({"spec": {**TINY.facts(), "x": 1}}, "unreadable"),
    "a field missing": ({"spec": {"encoder": "clip", "layers": 2}}, "unreadable"),
    "a text for a number": ({"spec": {**TINY.facts(), "layers": "2"}}, "unreadable"),
    "a hostile number": ({"spec": {**TINY.facts(), "layers": 10**6}}, "every linear"),
    "no structure": ({"structure": None}, "unreadable"),
    "half a structure": ({"structure": dict([*STRUCTURE.items()][:6])}, "every linear"),
    "other linears": ({"structure": {n + "x": v for n, v in STRUCTURE.items()}}, "every linear"),
    "another precision": ({"structure": {**STRUCTURE, FC1: "int4"}}, "precision is unknown"),
    "an unhashable precision": ({"structure": {**STRUCTURE, FC1: []}}, "unreadable"),
    "no body": ({"body": None}, "unreadable"),
    "another body": ({"body": "float64"}, "precision is unknown"),
    "16 bit that is FP8": ({"structure": {**STRUCTURE, FC1: "16bit"}}, "F8_E4M3"),
}


@pytest.mark.parametrize(("changes", "words"), BAD_FACTS.values(), ids=BAD_FACTS)
def test_bad_metadata(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(FileError, match=words) as caught:
        open_quantized(saved(tmp_path / "c.safetensors", **changes))
    assert caught.value.remedy == "build it again from the original file"


def test_a_hostile_number_of_layers_is_not_counted_out(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", spec={**TINY.facts(), "layers": 10**6})
    start = time.process_time()
    with pytest.raises(FileError):
        open_quantized(path)
    assert time.process_time() - start < 1  # listing them takes several seconds and gigabytes


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"clip"', '{"schema": 1, "spec": 3}'])
def test_metadata_that_is_no_object(tmp_path: Path, text: str) -> None:
    save_file(dict(quantized_tiny().tensors), tmp_path / "c", {"octavo": text})
    with pytest.raises(FileError, match="unreadable Octavo metadata"):
        open_quantized(tmp_path / "c")


ONE = torch.ones(())
BAD_TENSORS = {
    "weight missing": ({FC1 + ".weight": None}, r"lacks the tensor .*fc1\.weight"),
    "bias missing": ({FC1 + ".bias": None}, r"lacks the tensor .*fc1\.bias"),
    "weight scale missing": ({FC1 + ".weight_scale": None}, r"lacks .*fc1\.weight_scale"),
    "input scale missing": ({FC1 + ".input_scale": None}, r"lacks .*fc1\.input_scale"),
    "16-bit weight": ({FC1 + ".weight": torch.ones(256, 128).half()}, r"as F16 .*not F8_E4M3"),
    "misshaped weight": ({FC1 + ".weight": torch.ones(128, 256).to(E4M3)}, r"not F8_E4M3 \[256"),
    "misshaped bias": ({FC1 + ".bias": torch.ones(128).half()}, r"\[128\], not .*\[256\]"),
    "integer bias": ({FC1 + ".bias": torch.ones(256, dtype=torch.int16)}, "as I16"),
    "fp16 scale": ({FC1 + ".weight_scale": ONE.half()}, r"as F16 \[\], not F32 \[\]"),
    "a scale per channel": ({FC1 + ".weight_scale": torch.ones(256)}, r"F32 \[256\], not F32 \[\]"),
    "an input scale of a vector": ({FC1 + ".input_scale": torch.ones(1)}, r"\[1\], not"),
    "FP8 token table": ({TOKENS: torch.ones(49408, 128).to(E4M3)}, "as F8_E4M3"),
}


@pytest.mark.parametrize(("changes", "words"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_bad_tensors(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(FileError, match=words):
        open_quantized(saved(tmp_path / "c.safetensors", **changes))


def test_octavos_own_reader_sees_the_same(tmp_path: Path) -> None:
    """The names ComfyUI looks for, as checkpoints/files.py reads them."""
    quantized_tiny().save(tmp_path / "c.safetensors")
    with open_weights(tmp_path / "c.safetensors") as file:
        assert file.tensors[FC1 + ".weight"].dtype == "F8_E4M3"
        assert file.tensors[FC1 + ".comfy_quant"].dtype == "U8"
        assert file.tensors[FC1 + ".input_scale"].shape == ()
    assert torch.finfo(E4M3).max == FP8_MAX
