# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""T5 in real graphs: what is PyTorch's, LoRA, memory, and the FP8 files that people have.

The files hold a T5 as narrow as ComfyUI recognises one: 24 blocks with 10240 inner features.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fp8_files as f
import pytest
import torch
from comfy_server import Graph, Ref
from octavo.checkpoints import detect, fingerprint
from octavo.checkpoints.quantized import open_quantized
from octavo.encoders import ClipSpec, T5Spec
from octavo.seeded import seeded_tensors
from safetensors.torch import load_file, save_file
from test_graphs import NARROW, assert_alike, both, cosines

if TYPE_CHECKING:
    from comfy_server import Server

pytestmark = [pytest.mark.comfyui, pytest.mark.timeout(900)]

WIDTH, HEADS, HEAD_DIM = 64, 2, 32
SPEC = T5Spec(24, WIDTH, 10240, HEADS, HEAD_DIM, 32128)
CONFIG = json.dumps({"d_model": WIDTH, "num_heads": HEADS, "d_kv": HEAD_DIM})
CLIP = ClipSpec(12, 128, 512, 2, 77, 49408, "quick_gelu")
LOW = {"similarity_floor": 0.5}  # 24 blocks, 64 wide
SERVED = {"engine": "torch_fp8", "why_host": ""}


def gentle(spec: T5Spec | ClipSpec) -> dict[str, torch.Tensor]:
    """Weights whose residual stream grows slowly, so that FP8 stays close over 24 narrow blocks."""
    tensors = dict(seeded_tensors(spec, outliers=False))
    for name, tensor in tensors.items():
        if name.endswith(("SelfAttention.o.weight", "wo.weight")):
            tensors[name] = tensor * 0.3
    return tensors


@pytest.fixture(scope="module")
def folder(server: Server) -> Path:
    return server.base / "models" / "text_encoders"


@pytest.fixture(scope="module")
def coded() -> f.Codes:
    return f.coded(gentle(SPEC), SPEC.linears())


def load(graph: Graph, names: str, kind: str = "PIXART") -> Ref:
    return graph.add("OctavoTestFiles", names=names, form=kind, t5=CONFIG)


def test_another_layer_is_pytorch(server: Server) -> None:
    """Clip skip reaches T5 in FLUX: its engines have the last state alone."""
    graph = Graph()

    def make(c: Ref) -> Ref:
        last = graph.add("CLIPSetLastLayer", clip=c, stop_at_clip_layer=-2)
        return graph.encode(last, "a (red:1.2) cat")

    clip = graph.clip("flux")
    conditioning = both(graph, clip, "t5-skip", make, **NARROW)
    ours = graph.octavo(clip, **NARROW)
    state = server.state(ours, conditioning, graph)
    assert "not one that Octavo knows" in state["served"]["t5xxl"]["why_host"]
    plain, got = server.kept("t5-skip-plain"), server.kept("t5-skip-ours")
    assert torch.equal(plain["0.cond"], got["0.cond"])
    assert not torch.equal(plain["0.pooled_output"], got["0.pooled_output"])  # CLIP's, in FP8


def test_more_tokens_than_an_engine_takes_are_pytorchs(server: Server) -> None:
    graph = Graph()
    clip = graph.clip("pixart")
    last = both(graph, clip, "t5-1500", lambda c: graph.encode(c, "word " * 1500), **NARROW)
    graph.keep(graph.encode(graph.octavo(clip, **NARROW), "word " * 900), "t5-900-ours")
    graph.keep(graph.encode(clip, "word " * 900), "t5-900-plain")
    state = server.state(graph.octavo(clip, **NARROW), last, graph)
    assert state["served"]["t5xxl"]["engine"] == "torch_fp8"
    assert server.kept("t5-1500-ours")["0.cond"].shape[1] > 1024
    assert_alike(server, "t5-1500-plain", "t5-1500-ours", exact=True)
    assert_alike(server, "t5-900-plain", "t5-900-ours", floor=0.97)


def test_t5_lora_there_and_back(server: Server) -> None:
    graph = Graph()
    base = graph.clip("pixart", 3)
    ours = graph.octavo(base, **NARROW)
    steps = {
        "none": (base, ours),
        "a": (graph.lora(base, 1), graph.lora(ours, 1)),
        "b": (graph.lora(base, 2, -0.7), graph.octavo(graph.lora(base, 2, -0.7), **NARROW)),
    }
    for name, (plain, accelerated) in steps.items():
        graph.keep(graph.encode(plain, "a cat"), f"t5-lora-{name}-plain")
        graph.keep(graph.encode(accelerated, "a cat"), f"t5-lora-{name}-ours")
    server.run(graph)
    kept = {name: server.kept(f"t5-lora-{name}-ours")["0.cond"] for name in steps}
    base_plain = server.kept("t5-lora-none-plain")["0.cond"]
    for name in steps:
        assert_alike(server, f"t5-lora-{name}-plain", f"t5-lora-{name}-ours", floor=0.95)
        if name != "none":  # and nearer to the patched PyTorch than that is to the base's
            plain_cond = server.kept(f"t5-lora-{name}-plain")["0.cond"]
            near = float(cosines(kept[name], plain_cond).mean())
            assert near > 0.98 and near > float(cosines(base_plain, plain_cond).mean()) + 0.02
    for name in ("b", "a", "none"):
        again = Graph()
        clip = again.octavo(again.clip("pixart", 3), **NARROW)
        if name != "none":
            clip = again.lora(clip, {"a": 1, "b": 2}[name], 1.0 if name == "a" else -0.7)
        again.keep(again.encode(clip, "a cat"), "t5-lora-again")
        server.run(again)
        assert torch.equal(server.kept("t5-lora-again")["0.cond"], kept[name]), name


def test_t5_memory_comes_back(server: Server) -> None:
    results = []
    for i in range(2):
        graph = Graph()
        ours = graph.octavo(graph.clip("flux", 71), **NARROW)
        conditioning = graph.encode(ours, "a cat" + " " * i)
        graph.keep(conditioning, f"t5-memory-{i}")
        results.append(server.state(ours, conditioning, graph)["bytes"])
        node = graph.add("OctavoTestPress", clip=ours, after=conditioning)[0]
        steps = json.loads(server.run(graph)[node]["text"][0])
        assert steps[-1]["loaded"] == 0
        assert sum(s["really"] for s in steps) == results[-1] > 0
    assert results[0] == results[1]
    a, b = (server.kept(f"t5-memory-{i}")["0.cond"] for i in range(2))
    assert torch.equal(a, b)


@pytest.mark.parametrize("before", [1, 2])  # after one prompt all weights are still loaded
def test_pytorch_of_a_t5_gets_its_patches_when_it_is_asked(server: Server, before: int) -> None:
    """Under engines a LoRA leaves PyTorch's weights as they are; clip skip finds it there."""
    seed = 32 + before
    try:
        graph = Graph()
        base = graph.clip("pixart", seed)
        light = graph.add("OctavoTestLight", clip=graph.octavo(base, **NARROW), on=True)
        for i in range(before):
            graph.keep(graph.encode(light, f"a cat {i}"), f"t5-light-{i}")
        server.run(graph)
        graph = Graph()
        base = graph.clip("pixart", seed)
        light = graph.add("OctavoTestLight", clip=graph.octavo(base, **NARROW), on=True)
        lora = graph.lora(light, 1)
        conditioning = graph.encode(lora, "a cat")
        graph.keep(conditioning, f"t5-light-{before}-lora-ours")
        state = server.state(lora, conditioning, graph)
        assert state["served"]["t5xxl"] == SERVED
        assert before == 1 or not state["pytorch_patched"], "ComfyUI prepared all for nobody"
        skip = graph.add("CLIPSetLastLayer", clip=lora, stop_at_clip_layer=-2)
        graph.keep(graph.encode(skip, "a cat"), f"t5-light-{before}-skip-ours")
        server.run(graph)
    finally:
        off = Graph()
        light = off.add("OctavoTestLight", clip=off.clip("sd1"), on=False)
        off.keep(off.encode(light, "off"), f"t5-light-{before}-off")
        server.run(off)
    plain = Graph()
    lora = plain.lora(plain.clip("pixart", seed), 1)
    plain.keep(plain.encode(lora, "a cat"), f"t5-light-{before}-lora-plain")
    skip = plain.add("CLIPSetLastLayer", clip=lora, stop_at_clip_layer=-2)
    plain.keep(plain.encode(skip, "a cat"), f"t5-light-{before}-skip-plain")
    server.run(plain)
    assert_alike(server, f"t5-light-{before}-lora-plain", f"t5-light-{before}-lora-ours")
    ours, want = (server.kept(f"t5-light-{before}-skip-{n}")["0.cond"] for n in ("ours", "plain"))
    assert float(cosines(ours, want).min()) > 0.999


# FP8 files


def written(folder: Path, coded: f.Codes, form: str) -> str:
    """The name of a file in one of the forms that people have; non-linears are FP16."""
    name = f"t5_{form.replace(' ', '_')}.safetensors"
    path = folder / name
    if path.exists():
        return name
    if form == "plain":  # every tensor, as t5xxl_fp8_e4m3fn.safetensors
        tensors = {n: t.to(f.E4M3) for n, t in gentle(SPEC).items()}
    else:
        rest = {n: t.half() for n, t in coded.rest.items()}
        inputs = {} if form == "no input scales" else coded.input_scales
        changed = f.Codes(coded.codes, coded.weight_scales, inputs, rest)
        kind = "comfy_quant" if form == "no input scales" else form
        tensors = f.FORMATS[kind](changed)
    metadata = f.metadata(coded) if form == "metadata" else None
    save_file({n: t.contiguous() for n, t in tensors.items()}, path, metadata)
    return name


@pytest.fixture(scope="module")
def inputs(coded: f.Codes) -> f.Codes:
    """`coded` with input scales that the encoder's inputs fit."""
    scales = dict.fromkeys(coded.codes, 0.5)
    return f.Codes(coded.codes, coded.weight_scales, scales, coded.rest)


@pytest.mark.parametrize("form", ["legacy", "comfy_quant", "metadata", "no input scales", "plain"])
def test_codes_and_scales_of_a_file_are_the_engines(
    server: Server, folder: Path, inputs: f.Codes, form: str
) -> None:
    name = written(folder, inputs, form)
    graph = Graph()
    clip = load(graph, name)
    conditioning = both(graph, clip, f"t5-{form}", lambda c: graph.encode(c, "a cat"), **LOW)
    state = server.state(graph.octavo(clip, **LOW), conditioning, graph)
    assert state["served"] == {"t5xxl": SERVED}, state
    assert "saved" not in state["lines"][0]  # PyTorch holds it in FP8 as well
    assert_alike(server, f"t5-{form}-plain", f"t5-{form}-ours")
    (weights,) = detect(folder / name).encoders
    details = state["details"]["t5xxl"]
    assert details["recipe"] == "fp8" and details["body"] == fingerprint(weights).body
    checkpoint = open_quantized(Path(details["checkpoint"]))
    assert weights.quantized.keys() == SPEC.linears().keys()
    for linear, quantized in weights.quantized.items():
        codes = checkpoint.read(linear + ".weight")
        assert torch.equal(codes.view(torch.uint8), quantized.codes().view(torch.uint8)), linear
        scale = 1.0 if quantized.weight_scale is None else float(quantized.weight_scale)
        assert float(checkpoint.read(linear + ".weight_scale")) == scale
        if quantized.input_scale is not None:
            own = float(checkpoint.read(linear + ".input_scale"))
            assert own == float(quantized.input_scale) == 0.5


def test_a_lora_on_an_fp8_file(server: Server, folder: Path, inputs: f.Codes) -> None:
    """Patched, and without the patch again: the file's own codes as before."""
    name = written(folder, inputs, "legacy")
    graph = Graph()
    base = load(graph, name)
    ours = graph.octavo(base, **LOW)
    graph.keep(graph.encode(ours, "a dog"), "t5-fp8-before")
    graph.keep(graph.encode(graph.lora(ours, 1), "a dog"), "t5-fp8-lora-ours")
    graph.keep(graph.encode(ours, "a dog "), "t5-fp8-after")
    graph.keep(graph.encode(graph.lora(base, 1), "a dog"), "t5-fp8-lora-plain")
    server.run(graph)
    before, lora, plain = (
        server.kept(f"t5-fp8-{n}")["0.cond"] for n in ("before", "lora-ours", "lora-plain")
    )
    assert torch.equal(before, server.kept("t5-fp8-after")["0.cond"])
    # ComfyUI rounds the patched weights to FP8 too, and at random.
    assert float(cosines(lora, plain).mean()) > 0.95
    assert float(cosines(lora, plain).mean()) > float(cosines(before, plain).mean()) + 0.01


def test_a_clip_in_plain_fp8(server: Server) -> None:
    """As --fp8_e4m3fn-text-enc holds it: its codes are the values, and the engine's codes."""
    graph = Graph()
    clip = graph.clip("sd1_fp8")
    last = both(graph, clip, "clip-fp8", lambda c: graph.encode(c, "a (red:1.2) cat"), **NARROW)
    state = server.state(graph.octavo(clip, **NARROW), last, graph)
    assert state["served"] == {"clip_l": SERVED}, state
    assert_alike(server, "clip-fp8-plain", "clip-fp8-ours")
    checkpoint = open_quantized(Path(state["details"]["clip_l"]["checkpoint"]))
    scales = [checkpoint.read(n + ".weight_scale") for n in checkpoint.spec.linears()]
    assert all(scale == 1 for scale in scales)  # requantized it would be amax / 448
    graph.keep(graph.encode(graph.lora(clip, 1), "a cat"), "clip-fp8-lora-plain")
    lora = graph.lora(graph.octavo(clip, **NARROW), 1)
    graph.keep(graph.encode(lora, "a cat"), "clip-fp8-lora-ours")
    server.run(graph)
    assert_alike(server, "clip-fp8-lora-plain", "clip-fp8-lora-ours", floor=0.95)


def test_two_files_as_the_dual_loader_takes_them(
    server: Server, folder: Path, inputs: f.Codes
) -> None:
    save_file(gentle(CLIP), folder / "narrow_clip_l.safetensors")
    names = f"narrow_clip_l.safetensors {written(folder, inputs, 'comfy_quant')}"
    graph = Graph()
    clip = load(graph, names, "FLUX")
    conditioning = both(
        graph, clip, "t5-dual", lambda c: graph.encode(c, "a (red:1.3) cat, (dog:0)"), **LOW
    )
    state = server.state(graph.octavo(clip, **LOW), conditioning, graph)
    assert state["served"] == {"clip_l": SERVED, "t5xxl": SERVED}, state
    assert_alike(server, "t5-dual-plain", "t5-dual-ours")


def test_codes_without_their_scales_are_never_an_engines(
    server: Server, folder: Path, inputs: f.Codes
) -> None:
    """One linear of a plain file that holds a scaled file's codes: what a loader makes of it."""
    tensors = {n: t.half() for n, t in gentle(SPEC).items()}
    linear = SPEC.block(11) + "layer.0.SelfAttention.v"
    codes = inputs.codes[linear].half() / inputs.codes[linear].half().abs().max() * 448
    save_file({**tensors, linear + ".weight": codes}, folder / "t5_dropped.safetensors")
    graph = Graph()
    clip = load(graph, "t5_dropped.safetensors")
    conditioning = both(graph, clip, "t5-dropped", lambda c: graph.encode(c, "a cat"), **LOW)
    state = server.state(graph.octavo(clip, **LOW), conditioning, graph)
    assert state["served"]["t5xxl"]["engine"] == "host"
    assert "scale was dropped" in state["lines"][0]
    assert_alike(server, "t5-dropped-plain", "t5-dropped-ours", exact=True)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [("int8_tensorwise", torch.int8), ("float8_e5m2", torch.float8_e5m2)],
)
def test_other_formats_are_pytorchs(
    server: Server, folder: Path, form: str, dtype: torch.dtype
) -> None:
    """One linear that is quantized otherwise: dequantizing it is ComfyUI's business."""
    tensors = {n: t.half() for n, t in gentle(SPEC).items()}
    linear = SPEC.block(5) + "layer.0.SelfAttention.v"
    weight = tensors[linear + ".weight"].float()
    scale = weight.abs().max() / 127
    tensors[linear + ".weight"] = (weight / scale).round().to(dtype)
    tensors |= {linear + ".weight_scale": scale, linear + ".comfy_quant": f.note(format=form)}
    save_file(tensors, folder / f"t5_{form}.safetensors")
    graph = Graph()
    clip = load(graph, f"t5_{form}.safetensors")
    graph.keep(graph.encode(clip, "a cat"), f"t5-{form}-plain")
    ours = graph.octavo(clip, **LOW)
    conditioning = graph.encode(ours, "a cat")
    graph.keep(conditioning, f"t5-{form}-ours")
    state = server.state(ours, conditioning, graph)
    assert state["served"] == {}
    assert_alike(server, f"t5-{form}-plain", f"t5-{form}-ours", exact=True)


def test_saving_a_t5(server: Server, folder: Path, inputs: f.Codes) -> None:
    """What ComfyUI reads the scales of is written in FP8, and comes back as the same codes."""
    graph = Graph()
    clip = load(graph, written(folder, inputs, "legacy"))
    ours = graph.octavo(clip, **LOW)
    graph.keep(graph.encode(ours, "a cat"), "t5-save-before")
    saved = graph.add("OctavoSaveTextEncoder", clip=ours, name="my_t5")
    name = server.run(graph)[saved[0]]["text"][0]
    assert (folder / name).stat().st_size < 70e6  # 48 MB in FP8, 100 in 16 bit
    tensors = load_file(folder / name)
    for linear, codes in inputs.codes.items():
        assert torch.equal(tensors[linear + ".weight"].view(torch.uint8), codes.view(torch.uint8))
        assert tensors[linear + ".weight_scale"] == torch.tensor(inputs.weight_scales[linear])
        assert float(tensors[linear + ".input_scale"]) == 0.5
    (weights,) = detect(folder / name).encoders  # `octavo build` knows it as such a file too
    assert weights.quantized.keys() == SPEC.linears().keys()
    again = Graph()
    other = load(again, name)
    conditioning = both(again, other, "t5-saved", lambda c: again.encode(c, "a cat"), **LOW)
    state = server.state(again.octavo(other, **LOW), conditioning, again)
    assert state["served"]["t5xxl"] == SERVED
    assert_alike(server, "t5-saved-plain", "t5-saved-ours")
    assert torch.equal(
        server.kept("t5-saved-ours")["0.cond"], server.kept("t5-save-before")["0.cond"]
    )


def test_a_small_t5_is_saved_in_16_bit(server: Server, folder: Path) -> None:
    graph = Graph()
    ours = graph.octavo(graph.clip("mochi"), **NARROW)
    saved = graph.add("OctavoSaveTextEncoder", clip=ours, name="small")
    tensors: dict[str, Any] = load_file(folder / server.run(graph)[saved[0]]["text"][0])
    assert tensors and not any("scale" in n or "comfy_quant" in n for n in tensors)
    assert all(t.dtype in (torch.float16, torch.float32) for t in tensors.values())
