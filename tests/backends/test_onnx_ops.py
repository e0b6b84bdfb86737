# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The emitted graph: valid, and in ONNX Runtime the same arithmetic as tests/emulation.py."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from emulation import GraphOps, RuntimeOps
from octavo.backends.onnx_ops import (
    PROGRAM_VERSION,
    Graph,
    OnnxOps,
    activation_exponent,
    emit,
    weight_scale_unit,
)
from octavo.backends.plan_inputs import embedded_weights, plan_weights
from octavo.backends.torch_ops import ReferenceEncoder
from octavo.checkpoints.quantized import metadata, open_quantized
from octavo.encoders import encode
from octavo.encoders.clip import POSITIONS, ClipSpec
from octavo.recipes import load_recipe
from octavo.seeded import CLIP_G, CLIP_L, TINY
from octavo.verify import States, graph_run, measure
from samples import (
    TINY_GELU,
    Quantized,
    clip_l,
    clip_l_ranges,
    embeds_of,
    quantize,
    quantized_clip_l,
    quantized_tiny,
    tiny,
)
from torch import Tensor

E4M3 = torch.float8_e4m3fn
FLOAT8 = onnx.TensorProto.FLOAT8E4M3FN
RECIPES = ["fp8", "fp8-mixed", "bf16"]


def run_onnx(
    model: bytes | str, feeds: Mapping[str, Tensor], outputs: list[str] | None = None
) -> dict[str, Tensor]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    binding, held = session.io_binding(), []
    for name, tensor in feeds.items():
        if tensor.dtype == E4M3:
            array = tensor.contiguous().view(torch.uint8).numpy()
            value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, FLOAT8)
        else:
            value = ort.OrtValue.ortvalue_from_numpy(tensor.contiguous().numpy())
        held.append(value)
        binding.bind_ortvalue_input(name, value)
    names = outputs or [output.name for output in session.get_outputs()]
    for name in names:
        binding.bind_output(name)
    session.run_with_iobinding(binding)
    arrays = binding.copy_outputs_to_cpu()
    return {n: torch.from_numpy(array) for n, array in zip(names, arrays, strict=True)}


def attributes(node: onnx.NodeProto) -> dict[str, object]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


# The graph as a document


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("body", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("spec", [TINY, TINY_GELU], ids=["quick_gelu", "gelu"])
def test_shared_graphs_are_valid(recipe: str, body: str, mask: bool, spec: ClipSpec) -> None:
    graph = emit(spec, load_recipe(recipe).structure(spec.linears()), body=body, mask=mask)
    onnx.checker.check_model(graph.model, full_check=True)
    model = onnx.load_from_string(graph.model)
    assert [o.version for o in model.opset_import] == [20]
    inputs = [i.name for i in model.graph.input]
    assert inputs == ["embeds", *(["mask"] if mask else []), *graph.weights]
    outputs = [o.name for o in model.graph.output]
    assert tuple(outputs) == graph.outputs == ("hidden_0", "hidden_1", "hidden_2", "last")
    code = {"float16": 10, "bfloat16": 16, "float32": 1}[body]
    for value in (model.graph.input[0], *model.graph.output):
        kind = value.type.tensor_type
        assert kind.elem_type == code
        dims = [d.dim_param or d.dim_value for d in kind.shape.dim]
        assert dims == ["B", 77, spec.width] == list(graph.embeds.shape)
    if mask:
        kind = model.graph.input[1].type.tensor_type
        dims = [d.dim_param or d.dim_value for d in kind.shape.dim]
        assert (kind.elem_type, dims) == (onnx.TensorProto.BOOL, ["B", 77])
    assert graph.external == {} and (graph.body, graph.mask) == (body, mask)


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantizers_of_a_graph(recipe: str) -> None:
    """Both factors of every FP8 GEMM; scales constant powers of two, or TensorRT drops the GEMM."""
    structure = load_recipe(recipe).structure(TINY.linears())
    model = onnx.load_from_string(emit(TINY, structure).model)
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    producer = {output: node for node in model.graph.node for output in node.output}
    kinds = [node.op_type for node in model.graph.node]
    gemms = {"fp8": 8, "fp8-mixed": 6, "bf16": 0}[recipe]
    assert kinds.count("QuantizeLinear") == gemms
    assert kinds.count("DequantizeLinear") == 2 * gemms
    for node in model.graph.node:
        if node.op_type.endswith("QuantizeLinear"):
            scale = constants[node.input[1]]
            assert scale.dtype == np.float16 and scale.shape == ()
            assert scale in (2.0**-4, 2.0**-10)
            assert not constants[node.input[2]].astype(np.float32).any()
    lowered = [
        node
        for node in model.graph.node
        if node.op_type == "MatMul" and producer[node.input[0]].op_type == "DequantizeLinear"
    ]
    assert len(lowered) == gemms
    for node in lowered:
        transposed = producer[node.input[1]]
        assert attributes(transposed)["perm"] == [1, 0]
        weight = producer[transposed.input[0]].input[0]
        activation = producer[producer[node.input[0]].input[0]]
        assert activation.op_type == "QuantizeLinear"
        assert weight.removesuffix(".weight") + ".pre_scale" in producer[activation.input[0]].input
    assert "Attention" not in kinds and kinds.count("Softmax") == TINY.layers


def test_the_twin_of_a_bf16_graph_differs_in_dtype_alone() -> None:
    structure = load_recipe("fp8").structure(TINY.linears())
    bodies = [emit(TINY, structure, body=b, mask=True) for b in ("bfloat16", "float32")]
    models = [onnx.load_from_string(graph.model) for graph in bodies]
    nodes = [[(n.op_type, *n.input, *n.output) for n in m.graph.node] for m in models]
    assert nodes[0] == nodes[1]
    values = [
        {t.name: onnx.numpy_helper.to_array(t).astype(np.float32) for t in m.graph.initializer}
        for m in models
    ]
    assert values[0].keys() == values[1].keys()
    for name, value in values[1].items():
        np.testing.assert_allclose(values[0][name], value, rtol=2**-8)


def test_emission_is_deterministic() -> None:
    structure = load_recipe("fp8").structure(TINY.linears())
    assert emit(TINY, structure).model == emit(TINY, structure).model
    assert emit(TINY_GELU, structure).model != emit(TINY, structure).model
    assert PROGRAM_VERSION >= 1


@pytest.mark.parametrize("inner", [768, 1024, 1280, 3072, 4096, 5120, 5347, 5348, 10240, 20480])
def test_no_fp8_product_overflows_fp16(inner: int) -> None:
    """Nor does it waste a bit: half the scale would overflow, or is not needed up to 5347."""
    exponent = activation_exponent(inner)
    worst = 448.0 * 448.0 * inner * 2.0**-exponent * weight_scale_unit()
    assert worst <= 65504
    assert exponent == 4 or 2 * worst > 65504
    assert (exponent == 4) == (inner <= 5347)


# Against the emulation


def one_linear(
    precision: str, body: str, out: int, inner: int, wanted: list[str]
) -> tuple[bytes, list[str]]:
    """A graph of one linear `l`; `wanted` are operators whose results are outputs too."""
    ops = OnnxOps({"l": precision}, {"l": (out, inner)}, inner, body, 77, False, None)
    y = ops.linear("x", "l")
    make = onnx.helper
    names = [o for n in ops.nodes if n.op_type in wanted for o in n.output if o != y] + [y]
    x = make.make_tensor_value_info("x", ops._dtype, ["B", "S", inner])
    outputs = [make.make_tensor_value_info(name, ops._dtype, None) for name in names]
    graph = make.make_graph(ops.nodes, "linear", [x, *ops.inputs], outputs, ops.initializers)
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 20)], ir_version=10)
    return model.SerializeToString(), names


def linear_weights(
    out: int, inner: int, body: torch.dtype, amax: float = 12.0
) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    drawn = torch.randn(out, inner, generator=random)
    unit = 2.0 ** -activation_exponent(inner)
    return {
        "l.weight": (drawn * 448 / drawn.abs().max()).to(E4M3),
        "l.bias": torch.randn(out, generator=random).to(body),
        "l.pre_scale": torch.tensor([unit / (amax / 448)]).to(body),
        "l.post_scale": (torch.rand(out, generator=random) + 0.5).to(body),
    }


@pytest.mark.parametrize("body", [torch.float16, torch.float32])
@pytest.mark.parametrize("inner", [64, 768, 10240])
def test_quantize_and_dequantize_are_bit_exact(body: torch.dtype, inner: int) -> None:
    amax = 12.0
    weights = linear_weights(8, inner, body, amax)
    name = str(body).removeprefix("torch.")
    model, names = one_linear("fp8", name, 8, inner, ["DequantizeLinear"])
    random = torch.Generator().manual_seed(1)
    x = torch.randn(2, 256, inner, generator=random) * 3
    flat = x.view(-1)
    step = amax / 448
    values = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    values = values[values.isfinite()].unique() * step
    special = torch.cat(
        [
            values,  # every code, subnormal ones too,
            (values[1:] + values[:-1]) / 2,  # and every tie
            torch.tensor([0.0, -0.0, amax, -amax, amax * 1.05, 50.0, -50.0, 6e4, -6e4]),
            torch.tensor([2.0**-24, -(2.0**-24), 1e-5, step * 2**-10, step * 2**-11]),
        ]
    )
    flat[: len(special)] = special
    flat[1000:3000] *= 1e-3
    x = x.to(body)
    outputs = run_onnx(model, {"x": x, **weights})
    ops = GraphOps({"l": "fp8"}, weights, body)
    codes, unit = ops.quantized(x, "l")
    assert codes.view(torch.uint8).unique().numel() > 250  # all but NaN
    assert torch.equal(outputs[names[0]].float(), codes.float() * unit)
    dequantized = (weights["l.weight"].float() * 2.0**-10).to(body)
    assert torch.equal(outputs[names[1]], dequantized)


@pytest.mark.parametrize("precision", ["fp8", "16bit"])
@pytest.mark.parametrize(("out", "inner"), [(768, 768), (3072, 768), (96, 5120), (64, 10240)])
def test_one_linear(precision: str, out: int, inner: int) -> None:
    """Within 1e-5; in fp16 ONNX Runtime rounds fewer results than the graph says.

    16-bit products are no sums of few-bit factors, so more of them round to the other side.
    """
    x = torch.randn(2, 77, inner, generator=torch.Generator().manual_seed(2)) * 2
    for body, kind, tolerance in (
        (torch.float32, GraphOps, 1e-5),
        (torch.float16, RuntimeOps, 1e-5 if precision == "fp8" else 5e-5),
        (torch.float16, GraphOps, 2.0**-10),
    ):
        weights = linear_weights(out, inner, body)
        if precision == "16bit":
            weights = {
                "l.weight": (weights["l.weight"].float() * inner**-0.5 / 100).to(body),
                "l.bias": weights["l.bias"],
            }
        model, names = one_linear(precision, str(body).removeprefix("torch."), out, inner, [])
        got = run_onnx(model, {"x": x.to(body), **weights})[names[0]]
        expected = kind({"l": precision}, weights, body).linear(x.to(body), "l").to(body)
        assert got.dtype == body
        error = (got.float() - expected.float()).norm() / expected.float().norm()
        assert error < tolerance, (body, kind, error)


@pytest.mark.parametrize("inner", [768, 5347, 5348, 20480])
def test_the_worst_product_is_finite(inner: int) -> None:
    """All of both factors at 448, in the graph itself, with the product rounded to fp16."""
    model, names = one_linear("fp8", "float16", 4, inner, ["MatMul"])
    weights = linear_weights(4, inner, torch.float16)
    weights["l.weight"] = torch.full((4, inner), 448.0).to(E4M3)
    product = run_onnx(model, {"x": torch.full((1, 1, inner), 100.0).half(), **weights})[names[0]]
    unit = 2.0 ** -activation_exponent(inner) * weight_scale_unit()
    assert product.isfinite().all()
    assert product.max().item() == pytest.approx(448 * 448 * inner * unit, rel=1e-3)


def emulate(
    quantized: Quantized,
    embeds: Tensor,
    mask: Tensor | None = None,
    *,
    weights: Mapping[str, Tensor],
    body: torch.dtype,
    kind: type[GraphOps] = GraphOps,
) -> tuple[list[Tensor], Tensor]:
    ops = kind(quantized.structure, weights, body)
    with torch.no_grad():
        return encode(ops, quantized.spec, embeds.to(body), mask)


def widened(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: t if t.dtype == E4M3 else t.float() for n, t in weights.items()}


def similarity(got: Mapping[str, Tensor], hidden: list[Tensor], last: Tensor):
    before_last = f"hidden_{len(hidden) - 2}"
    return measure(States(last, hidden[-2], None), States(got["last"], got[before_last], None))


def test_a_whole_encoder_in_fp32_is_the_emulation() -> None:
    """No fp16 to round differently: two blocks with outliers agree to the last digits."""
    for recipe in ("fp8", "fp8-mixed"):
        for spec in (TINY, TINY_GELU):
            quantized = quantized_tiny(recipe, spec)
            weights = widened(quantized.plan_weights())
            embeds = embeds_of(spec, tiny(spec), 4)
            graph = emit(spec, quantized.structure, body="float32")
            got = run_onnx(graph.model, {"embeds": embeds, **weights})
            hidden, last = emulate(quantized, embeds, weights=weights, body=torch.float32)
            # a value within 1e-7 of a tie may fall to either side; FP8 itself costs 6e-3
            assert similarity(got, hidden, last).token_mean > 1 - 1e-4
            first = (got["hidden_1"] - hidden[1]).norm() / hidden[1].norm()
            assert first < 1e-3, first


@pytest.mark.parametrize("spec", [TINY, TINY_GELU], ids=["quick_gelu", "gelu"])
@pytest.mark.parametrize("recipe", ["fp8", "fp8-mixed"])
def test_a_whole_encoder_in_fp16(spec: ClipSpec, recipe: str) -> None:
    quantized = quantized_tiny(recipe, spec)
    weights = quantized.plan_weights()
    embeds = embeds_of(spec, tiny(spec), 4)
    got = run_onnx(emit(spec, quantized.structure).model, {"embeds": embeds.half(), **weights})
    for kind in (GraphOps, RuntimeOps):
        hidden, last = emulate(quantized, embeds, weights=weights, body=torch.float16, kind=kind)
        assert similarity(got, hidden, last).token_mean >= 0.998, kind
    assert list(got) == [*(f"hidden_{i}" for i in range(3)), "last"]
    assert all(t.dtype == torch.float16 and t.shape == embeds.shape for t in got.values())


@pytest.mark.slow
def test_the_whole_of_clip_l() -> None:
    """With outliers in FP32, and without them in fp16: there flips are all that differs."""
    weights = clip_l()
    embeds = embeds_of(CLIP_L, weights, 2)
    quantized = quantized_clip_l()
    inputs = widened(quantized.plan_weights())
    graph = emit(CLIP_L, quantized.structure, body="float32")
    got = run_onnx(graph.model, {"embeds": embeds, **inputs}, ["hidden_11", "last"])
    hidden, last = emulate(quantized, embeds, weights=inputs, body=torch.float32)
    assert similarity(got, hidden, last).token_mean >= 0.998

    plain = {n: t.clamp(max=1.5) if "norm" in n else t for n, t in weights.items()}
    ranges = {
        n: amax / (1 if n.endswith(("out_proj", "fc2")) else 12)
        for n, amax in clip_l_ranges().items()
    }
    quantized = quantize(CLIP_L, plain, ranges)
    inputs = quantized.plan_weights()
    graph = emit(CLIP_L, quantized.structure)
    got = run_onnx(graph.model, {"embeds": embeds.half(), **inputs}, ["hidden_11", "last"])
    hidden, last = emulate(quantized, embeds, weights=inputs, body=torch.float16)
    assert similarity(got, hidden, last).token_mean >= 0.998


def sixteen_bit(spec: ClipSpec, body: str = "float32") -> tuple[Quantized, dict[str, Tensor]]:
    """Everything in `body`: what is left is the emitter's mathematics."""
    recipe = replace(load_recipe("bf16"), body=body)
    quantized = quantize(spec, tiny(spec), {}, recipe)
    return quantized, quantized.plan_weights()


def padding_mask(batch: int) -> Tensor:
    mask = torch.ones(batch, 77, dtype=torch.bool)
    for row in range(1, batch):
        mask[row, 7 * row :] = False
    mask[0, 30:40] = False
    return mask


@pytest.mark.parametrize("spec", [TINY, TINY_GELU], ids=["quick_gelu", "gelu"])
@pytest.mark.parametrize("masked", [False, True])
def test_an_fp32_graph_is_the_reference_at_any_batch(spec: ClipSpec, masked: bool) -> None:
    quantized, weights = sixteen_bit(spec)
    graph = emit(spec, quantized.structure, body="float32", mask=masked)
    reference = ReferenceEncoder(spec, tiny(spec).__getitem__)
    for batch in (1, 2, 5):
        embeds = embeds_of(spec, tiny(spec), batch)
        mask = padding_mask(batch) if masked else None
        feeds = {"embeds": embeds, **weights, **({"mask": mask} if mask is not None else {})}
        got = run_onnx(graph.model, feeds)
        hidden, last = reference(embeds, mask)
        for name, expected in zip(graph.outputs, [*hidden, last], strict=True):
            error = (got[name] - expected).norm() / expected.norm()
            assert got[name].shape == expected.shape and error < 1e-5, f"{name}: {error:.1e}"


@pytest.mark.parametrize("recipe", ["fp8", "fp8-mixed"])
def test_a_mask_in_an_fp8_graph(recipe: str) -> None:
    quantized = quantized_tiny(recipe)
    embeds, mask = embeds_of(TINY, tiny(), 3), padding_mask(3)
    graph = emit(TINY, quantized.structure, mask=True)
    weights = quantized.plan_weights()
    got = run_onnx(graph.model, {"embeds": embeds.half(), "mask": mask, **weights})
    hidden, last = emulate(quantized, embeds, mask, weights=weights, body=torch.float16)
    assert similarity(got, hidden, last).token_mean >= 0.998
    exact, exact_last = ReferenceEncoder(TINY, tiny().__getitem__)(embeds, mask)
    assert similarity(got, exact, exact_last).token_mean >= 0.99
    unmasked, unmasked_last = ReferenceEncoder(TINY, tiny().__getitem__)(embeds)
    assert similarity(got, unmasked, unmasked_last).token_min < 0.9  # the mask did something


@pytest.mark.parametrize("mask", [False, True])
def test_graph_run_gives_the_last_two_states(mask: bool) -> None:
    quantized = quantized_tiny()
    graph = emit(TINY, quantized.structure, mask=mask)
    weights, embeds = quantized.plan_weights(), embeds_of(TINY, tiny(), 3)
    run = graph_run(graph, weights)
    feeds = {"embeds": embeds.half(), **weights}
    if mask:
        feeds["mask"] = torch.ones(3, 77, dtype=torch.bool)
    expected = run_onnx(graph.model, feeds, ["hidden_1", "last"])
    for _ in range(2):  # a second call is a new answer, not the same memory
        penultimate, final = run(embeds)
        assert torch.equal(penultimate, expected["hidden_1"])
        assert torch.equal(final, expected["last"])
    run(embeds.flip(0))
    assert torch.equal(final, expected["last"])
    assert torch.equal(run(embeds[:1])[1], run_one(graph, weights, embeds[:1]))


def run_one(graph: Graph, weights: Mapping[str, Tensor], embeds: Tensor) -> Tensor:
    feeds = {"embeds": embeds.half(), **weights}
    if graph.mask:
        feeds["mask"] = torch.ones(embeds.shape[:2], dtype=torch.bool)
    return run_onnx(graph.model, feeds, ["last"])["last"]


def test_the_bf16_recipe_through_its_fp32_twin() -> None:
    """Weights rounded to bf16 and widened; the body in FP32."""
    quantized = quantized_tiny("bf16")
    assert quantized.body == "bfloat16"
    weights = quantized.plan_weights()
    assert {t.dtype for t in weights.values()} == {torch.bfloat16}
    graph = emit(TINY, quantized.structure, body="float32")
    embeds = embeds_of(TINY, tiny(), 4)
    got = run_onnx(graph.model, {"embeds": embeds, **widened(weights)})
    read = {n: t.bfloat16().float() for n, t in tiny().items()}.__getitem__
    hidden, last = ReferenceEncoder(TINY, read)(embeds)
    assert similarity(got, hidden, last).token_min > 1 - 1e-6
    exact, exact_last = ReferenceEncoder(TINY, tiny().__getitem__)(embeds)
    found = similarity(got, exact, exact_last)
    assert found.token_min > 0.999 and 0.9999 < found.token_mean < 1 - 1e-7


# Embedded weights


def embedded(quantized: Quantized, folder: Path, body: str, **options: bool) -> tuple[Graph, Path]:
    checkpoint = quantized.save(folder / "encoder.safetensors")
    graph = emit(
        quantized.spec,
        quantized.structure,
        body=body,
        embed=embedded_weights(checkpoint, body),
        **options,
    )
    path = folder / "graph.onnx"
    path.write_bytes(graph.model)
    return graph, path


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mask", [False, True])
def test_embedded_graphs_are_valid_and_name_the_bytes_in_the_checkpoint(
    recipe: str, mask: bool, tmp_path: Path
) -> None:
    quantized = quantized_tiny(recipe)
    graph, path = embedded(quantized, tmp_path, quantized.body, mask=mask)
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(path, load_external_data=False)
    assert [i.name for i in model.graph.input] == ["embeds", *(["mask"] if mask else [])]
    assert graph.weights == {}
    data = (tmp_path / "encoder.safetensors").read_bytes()
    outside = {t.name: t for t in model.graph.initializer if t.data_location == t.EXTERNAL}
    assert outside.keys() == graph.external.keys()
    for name, tensor in outside.items():
        place = {entry.key: entry.value for entry in tensor.external_data}
        assert place["location"] == "encoder.safetensors"
        assert not tensor.raw_data
        at, size = int(place["offset"]), int(place["length"])
        stored = quantized.tensors[graph.external[name].tensor]
        assert data[at : at + size] == stored.view(torch.uint8).numpy().tobytes()
        assert tuple(tensor.dims) == graph.external[name].type.shape == tuple(stored.shape)
        assert tensor.data_type == (FLOAT8 if stored.dtype == E4M3 else onnx.TensorProto.FLOAT16)
    if recipe != "bf16":  # of those fp16 tensors none is in bf16
        assert outside.keys() == {n + ".weight" for n in TINY.linears()}
        weights = sum(t.numel() for n, t in quantized.tensors.items() if n in outside)
        vectors = 4 * (2 * 77 * 128 + 77 * 77 + 40 * 256)
        assert len(graph.model) < vectors < weights
        some = quantized.tensors[TINY.block(0) + "mlp.fc1.weight"].view(torch.uint8)
        assert some.numpy().tobytes()[:64] not in graph.model


@pytest.mark.parametrize("recipe", ["fp8", "fp8-mixed"])
def test_an_embedded_graph_equals_the_shared_one(recipe: str, tmp_path: Path) -> None:
    """Through a file beside the checkpoint, which ONNX Runtime maps itself."""
    quantized = quantized_tiny(recipe)
    embeds = embeds_of(TINY, tiny(), 3)
    for body in ("float32", "float16"):
        _, path = embedded(quantized, tmp_path, body)
        x = embeds.half() if body == "float16" else embeds
        inside = run_onnx(str(path), {"embeds": x})
        shared = emit(TINY, quantized.structure, body=body)
        weights = plan_weights(TINY, quantized.structure, quantized.tensors.__getitem__, body)
        outside = run_onnx(shared.model, {"embeds": x, **weights})
        assert inside.keys() == outside.keys()
        for name, expected in outside.items():
            # q, k and v are three GEMMs here and one there: sums may end in another last digit
            error = (inside[name].float() - expected.float()).norm() / expected.float().norm()
            assert error < (1e-5 if body == "float32" else 0.06), (body, name, error)


def test_graph_run_of_an_embedded_graph(tmp_path: Path) -> None:
    quantized = quantized_tiny()
    graph, path = embedded(quantized, tmp_path, "float16")
    embeds = embeds_of(TINY, tiny(), 2)
    penultimate, final = graph_run(graph, {}, model_path=str(path))(embeds)
    expected = run_onnx(str(path), {"embeds": embeds.half()})
    assert torch.equal(final, expected["last"]) and torch.equal(penultimate, expected["hidden_1"])


def sparse_checkpoint(path: Path, spec: ClipSpec) -> int:
    """An FP8 checkpoint of `spec` whose large tensors are holes in the file -> bytes of weights."""
    structure = load_recipe("fp8").structure(spec.linears())
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in spec.tensors().items():
        linear = name.removesuffix(".weight")
        if linear in structure and linear != name:
            shapes[name] = ("F8_E4M3", shape)
            shapes[linear + ".weight_scale"] = shapes[linear + ".input_scale"] = ("F32", ())
        else:
            shapes[name] = ("F16", shape)
    header: dict[str, object] = {}
    end, scales, weights = 0, [], 0
    for name, (dtype, shape) in shapes.items():
        size = math.prod(shape) * {"F8_E4M3": 1, "F16": 2, "F32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        scales += [end] if dtype == "F32" else []
        weights += size if dtype == "F8_E4M3" else 0
        end += size
    facts = {"spec": spec.facts(), "structure": structure, "body": "float16"}
    header["__metadata__"] = metadata(facts)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        for at in scales:
            file.seek(8 + len(text) + at)
            file.write(np.float32(0.01).tobytes())
    return weights


def test_more_than_two_gigabytes_of_weights(tmp_path: Path) -> None:
    """protobuf ends at 2 GB; only what is named, not copied, can go beyond."""
    spec = replace(CLIP_G, width=2560, feed_forward=10240, heads=40, vocabulary=64)
    path = tmp_path / "large.safetensors"
    assert sparse_checkpoint(path, spec) > 2**31
    checkpoint = open_quantized(path)
    graph = emit(spec, checkpoint.structure, embed=embedded_weights(checkpoint, "float16"))
    assert len(graph.model) < 10e6
    assert len(graph.external) == 6 * spec.layers
    model = onnx.load_from_string(graph.model)
    ends = [
        int(place["offset"]) + int(place["length"])
        for t in model.graph.initializer
        if (place := {e.key: e.value for e in t.external_data})
    ]
    assert 2**31 < max(ends) <= path.stat().st_size
    (tmp_path / "graph.onnx").write_bytes(graph.model)
    onnx.checker.check_model(str(tmp_path / "graph.onnx"))


def test_positions_are_a_weight_of_the_graph() -> None:
    graph = emit(TINY, load_recipe("fp8").structure(TINY.linears()))
    assert graph.weights[POSITIONS].shape == (77, 128)
    long = replace(TINY, positions=248)
    graph = emit(long, load_recipe("fp8").structure(long.linears()))
    assert graph.embeds.shape == ("B", 248, 128)
    assert graph.weights[POSITIONS].shape == (248, 128)
