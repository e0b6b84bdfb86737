# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Real graphs through a real server: what the FP8 node gives against the graph without it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from comfy_server import Graph, Ref
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from comfy_server import Server

pytestmark = [pytest.mark.comfyui, pytest.mark.timeout(900)]

FLOOR = 0.985  # cosine per row; the tiny random encoders reach 0.99 and more, a wrong layer 0.5
NARROW = {"similarity_floor": 0.9}  # T5's own, 0.998, is for encoders as wide as they are used
_T5_XXL = ("sd3", "flux", "pixart", "mochi", "ltxv", "hidream")
WITH_T5 = {
    **{family: {"t5xxl"} for family in _T5_XXL},
    "wan": {"umt5xxl"},
    "aura": {"pile_t5xl"},
}
PROMPTS = {
    "plain": "a photo of a cat",
    "empty": "",
    "weights": "a (red:1.3) cat, (dog:0.0), (bird:-1), ((fish)), \\(escaped\\)",
    "long": "a castle on a hill, " * 24,
    "long and weighted": "(a castle:1.2) on a hill, " * 24,
    "textual inversion": "a cat, embedding:tiny, (embedding:tiny:1.3)",
    "wrong width": "a cat, embedding:other",
    "other writing": "ein schönes Bild, 一只猫 🐈",
}


def cosines(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = a.double().reshape(-1, a.shape[-1]), b.double().reshape(-1, b.shape[-1])
    zero = (a.abs().sum(-1) == 0) & (b.abs().sum(-1) == 0)
    return torch.where(zero, 1.0, F.cosine_similarity(a, b, dim=-1))


def assert_alike(
    server: Server, plain: str, ours: str, *, exact: bool = False, floor: float = FLOOR
) -> None:
    """Every tensor of two kept conditionings is equal, or close by the cosine of its rows."""
    a, b = server.kept(plain), server.kept(ours)
    assert a.keys() == b.keys()
    assert server.facts(plain) == server.facts(ours)
    changed = False
    for name in a:
        assert a[name].shape == b[name].shape and a[name].dtype == b[name].dtype, name
        if exact or a[name].dtype != torch.float32:
            assert torch.equal(a[name], b[name]), name
        else:
            low = float(cosines(a[name], b[name]).min())
            assert low > floor, f"{ours} {name}: {low}"
        changed |= not torch.equal(a[name], b[name])
    assert exact or changed, f"{ours}: the engine did not serve"


def both(graph: Graph, clip: Ref, name: str, make: Any, **settings: Any) -> Ref:
    """Keep `make(clip)` without and with Octavo as "<name>-plain" and "<name>-ours"."""
    graph.keep(make(clip), f"{name}-plain")
    ours = graph.octavo(clip, **settings)
    conditioning = make(ours)
    graph.keep(conditioning, f"{name}-ours")
    return conditioning


@pytest.fixture(scope="module", autouse=True)
def _embeddings(server: Server) -> None:
    folder = server.base / "models" / "embeddings"
    random = torch.Generator().manual_seed(5)
    both = {
        "clip_l": torch.randn(3, 128, generator=random) * 0.3,
        "clip_g": torch.randn(3, 192, generator=random) * 0.3,
        "t5xxl": torch.randn(3, 128, generator=random) * 0.3,  # SD3's T5 is wider
    }
    save_file(both, folder / "tiny.safetensors")
    save_file({"emb_params": torch.randn(2, 96, generator=random)}, folder / "other.safetensors")


@pytest.mark.parametrize(
    "family",
    [
        "sd1", "sd2", "sdxl", "refiner", "cascade", "sd3", "sd3_no_t5", "flux", "long", "long_sdxl",
        "pixart", "mochi", "ltxv", "hidream", "wan", "aura",
    ],
)  # fmt: skip
def test_families(server: Server, family: str) -> None:
    graph = Graph()
    clip, floor = graph.clip(family), NARROW if family in WITH_T5 else {}
    for name, text in PROMPTS.items():
        both(graph, clip, f"{family}-{name}", lambda c, text=text: graph.encode(c, text), **floor)
    for name, how in (("unprojected", "unprojected"), ("without a dict", "loaded")):
        both(
            graph, clip, f"{family}-{name}",
            lambda c, how=how: graph.add("OctavoTestEncode", clip=c, text="a cat", how=how),
            **floor,
        )  # fmt: skip
    both(
        graph, clip, f"{family}-zeroed",
        lambda c: graph.add("ConditioningZeroOut", conditioning=graph.encode(c, "a cat")),
        **floor,
    )  # fmt: skip
    ours = graph.octavo(clip, **floor)
    state = server.state(ours, graph.encode(ours, "the last one"), graph)
    assert state["served"].keys() == state["details"].keys() >= WITH_T5.get(family, set())
    assert not any("PyTorch" in line for line in state["lines"]), state["lines"]
    assert all(served["recipe"] == "fp8" for served in state["details"].values()), state
    for encoder, served in state["served"].items():
        assert served == {"engine": "torch_fp8", "why_host": ""}, encoder
    for name in [*PROMPTS, "unprojected", "without a dict"]:
        assert_alike(server, f"{family}-{name}-plain", f"{family}-{name}-ours")
    assert_alike(server, f"{family}-zeroed-plain", f"{family}-zeroed-ours", exact=True)


@pytest.mark.parametrize("family", ["sd1", "sd2", "sdxl", "sd3_no_t5"])
@pytest.mark.parametrize("skip", [-1, -2, -12, -13, -24])
def test_clip_skip(server: Server, family: str, skip: int) -> None:
    graph = Graph()
    clip = graph.clip(family)

    def make(c: Ref) -> Ref:
        last = graph.add("CLIPSetLastLayer", clip=c, stop_at_clip_layer=skip)
        return graph.encode(last, "a (red:1.2) cat")

    name = f"skip-{family}-{-skip}"
    both(graph, clip, name, make)
    before = graph.add("CLIPSetLastLayer", clip=clip, stop_at_clip_layer=skip)
    graph.keep(graph.encode(graph.octavo(before), "a (red:1.2) cat"), f"{name}-before")
    server.run(graph)
    assert_alike(server, f"{name}-plain", f"{name}-ours")
    assert_alike(server, f"{name}-before", f"{name}-ours", exact=True)


def test_clip_skip_is_not_ignored(server: Server) -> None:
    graph = Graph()
    ours = graph.octavo(graph.clip("sd1"))
    for skip in (-1, -2):
        last = graph.add("CLIPSetLastLayer", clip=ours, stop_at_clip_layer=skip)
        graph.keep(graph.encode(last, "a cat"), f"skipped{skip}")
    server.run(graph)
    a, b = server.kept("skipped-1")["0.cond"], server.kept("skipped-2")["0.cond"]
    assert float(cosines(a, b).min()) < FLOOR


def test_encoders_of_one_node_for_each_field(server: Server) -> None:
    """SDXL's, SD3's, FLUX's and the refiner's encode nodes, with other texts per encoder."""
    graph = Graph()
    sizes = {
        "width": 1024, "height": 1024, "crop_w": 0, "crop_h": 0,
        "target_width": 1024, "target_height": 1024,
    }  # fmt: skip
    long = "a castle, " * 40
    makers = {
        "sdxl": lambda c: graph.add(
            "CLIPTextEncodeSDXL", clip=c, text_g="a cat", text_l=long, **sizes
        ),
        "refiner": lambda c: graph.add(
            "CLIPTextEncodeSDXLRefiner", clip=c, text="a cat", ascore=6.0, width=1024, height=1024
        ),
        "sd3": lambda c: graph.add(
            "CLIPTextEncodeSD3", clip=c, clip_l="a cat", clip_g=long, t5xxl="a dog",
            empty_padding="none",
        ),
        "flux": lambda c: graph.add(
            "CLIPTextEncodeFlux", clip=c, clip_l="a cat", t5xxl="a dog", guidance=3.5
        ),
    }  # fmt: skip
    for family, make in makers.items():
        both(graph, graph.clip(family), f"own-{family}", make, **NARROW)
    server.run(graph)
    for family in makers:
        assert_alike(server, f"own-{family}-plain", f"own-{family}-ours")


def test_weights_are_linear_in_the_answer(server: Server) -> None:
    graph = Graph()
    ours = graph.octavo(graph.clip("sd1"))
    for name, text in (("0", "(cat:0.0)"), ("1", "cat"), ("1.3", "(cat:1.3)"), ("e", "")):
        graph.keep(graph.encode(ours, text), f"linear-{name}")
    server.run(graph)
    zero, one, more, empty = (server.kept(f"linear-{n}")["0.cond"] for n in ("0", "1", "1.3", "e"))
    cat = 1  # the position of the only weighted token
    assert torch.allclose(zero[0, cat], empty[0, cat], atol=1e-6)
    assert torch.allclose(more[0, cat], empty[0, cat] + 1.3 * (one - empty)[0, cat], atol=1e-4)


@pytest.mark.parametrize("family", ["sd1", "sdxl"])
def test_lora_in_any_order(server: Server, family: str) -> None:
    """A, B, A, none; before and after our node; two at once; strength 0; other branches between."""
    text = "a photo of a (cat:1.1)"
    graph = Graph()
    base = graph.clip(family)
    ours = graph.octavo(base)
    steps: dict[str, tuple[Ref, Ref]] = {
        "none": (base, ours),
        "a": (graph.lora(base, 1), graph.lora(ours, 1)),
        "b": (graph.lora(base, 2, -0.7), graph.lora(ours, 2, -0.7)),
        "zero": (graph.lora(base, 1, 0.0), graph.lora(ours, 1, 0.0)),
        "a before": (graph.lora(base, 1), graph.octavo(graph.lora(base, 1))),
        "a and b": (
            graph.lora(graph.lora(base, 1), 2, -0.7),
            graph.lora(graph.octavo(graph.lora(base, 1)), 2, -0.7),
        ),
    }
    for name, (plain, accelerated) in steps.items():
        graph.keep(graph.encode(plain, text), f"lora-{family}-{name}-plain")
        graph.keep(graph.encode(accelerated, text), f"lora-{family}-{name}-ours")
    server.run(graph)
    for name in steps:
        assert_alike(server, f"lora-{family}-{name}-plain", f"lora-{family}-{name}-ours")
    kept = {name: server.kept(f"lora-{family}-{name}-ours")["0.cond"] for name in steps}
    assert float(cosines(kept["none"], kept["a"]).min()) < 0.97  # it matters at all
    assert float(cosines(kept["a"], kept["b"]).min()) < 0.97
    assert torch.equal(kept["zero"], kept["none"])
    assert torch.equal(kept["a before"], kept["a"])
    # One after the other in new prompts: the second A is the first, and nothing of it stays behind.
    for i, seed in enumerate((1, 2, 1, None)):
        again = Graph()
        clip = again.octavo(again.clip(family))
        if seed is not None:
            clip = again.lora(clip, seed, 1.0 if seed == 1 else -0.7)
        again.keep(again.encode(clip, text + " " * i), f"lora-{family}-again")
        server.run(again)
        expected = kept["none" if seed is None else "ab"[seed - 1]]
        assert torch.equal(server.kept(f"lora-{family}-again")["0.cond"], expected), seed


@pytest.mark.parametrize("before", [1, 2])  # after one prompt all weights are still loaded
@pytest.mark.parametrize("how", ["inner", "unknown"])
def test_pytorch_gets_its_patches_when_it_is_asked(server: Server, how: str, before: int) -> None:
    """Under engines a LoRA leaves PyTorch's weights as they are; who reads them finds it there."""
    seed = {"inner": 31, "unknown": 33}[how] + before
    name = f"light-{how}-{before}"

    def step(make: Any) -> tuple[Graph, Ref, Ref]:
        graph = Graph()
        base = graph.clip("sdxl", seed)
        light = graph.add("OctavoTestLight", clip=graph.octavo(base), on=True)
        return make(graph, base, light)

    def asked(graph: Graph, clip: Ref) -> Ref:
        return graph.add("OctavoTestEncode", clip=clip, text="a cat", how=how)

    def served(graph: Graph, _: Ref, clip: Ref) -> tuple[Graph, Ref, Ref]:
        for i in range(before):  # the second leaves PyTorch's weights in RAM
            graph.keep(graph.encode(clip, f"a cat {i}"), f"{name}-{i}")
        return graph, clip, graph.encode(clip, f"a cat {before - 1}")

    def patched(graph: Graph, base: Ref, clip: Ref) -> tuple[Graph, Ref, Ref]:
        clip = graph.lora(clip, 1)
        conditioning = graph.encode(clip, "a cat")
        graph.keep(conditioning, f"{name}-lora-ours")
        return graph, clip, conditioning

    try:
        graph, clip, last = step(served)
        assert server.state(clip, last, graph)["pytorch_patched"]
        graph, clip, last = step(patched)
        state = server.state(clip, last, graph)
        assert before == 1 or not state["pytorch_patched"], "ComfyUI prepared all for nobody"
        for encoder in state["served"].values():
            assert encoder == {"engine": "torch_fp8", "why_host": ""}
        graph, base, light = step(lambda *made: made)
        lora = graph.lora(light, 1)
        inner = asked(graph, lora)
        graph.keep(inner, f"{name}-inner-ours")
        assert server.state(lora, inner, graph)["pytorch_patched"]
    finally:
        off = Graph()
        light = off.add("OctavoTestLight", clip=off.clip("sd1"), on=False)
        off.keep(off.encode(light, "off"), f"{name}-off")
        server.run(off)
    plain = Graph()
    base = plain.clip("sdxl", seed)
    plain.keep(asked(plain, base), f"{name}-inner-base")
    plain.keep(asked(plain, plain.lora(base, 1)), f"{name}-inner-plain")
    plain.keep(plain.encode(plain.lora(base, 1), "a cat"), f"{name}-lora-plain")
    server.run(plain)
    ours, want, base_ = (
        server.kept(f"{name}-inner-{n}")["0.cond"] for n in ("ours", "plain", "base")
    )
    assert float(cosines(ours, want).min()) > 0.999 > float(cosines(base_, want).mean())
    assert_alike(server, f"{name}-lora-plain", f"{name}-lora-ours")


def test_a_merge_after_one_prompt_is_whole(server: Server) -> None:
    """Its token table and final norm too, which ComfyUI itself reads under engines."""

    def merged(graph: Graph, clip: Ref) -> Ref:
        other = graph.clip("sd1", 38)
        return graph.add("CLIPMergeSimple", clip1=clip, clip2=other, ratio=0.3)

    try:
        for step in (lambda _, clip: clip, merged):
            graph = Graph()
            light = graph.add("OctavoTestLight", clip=graph.octavo(graph.clip("sd1", 37)), on=True)
            graph.keep(graph.encode(step(graph, light), "a cat"), "light-merge-ours")
            server.run(graph)
    finally:
        off = Graph()
        light = off.add("OctavoTestLight", clip=off.clip("sd1"), on=False)
        off.keep(off.encode(light, "off"), "light-merge-off")
        server.run(off)
    plain = Graph()
    plain.keep(plain.encode(merged(plain, plain.clip("sd1", 37)), "a cat"), "light-merge-plain")
    server.run(plain)
    assert_alike(server, "light-merge-plain", "light-merge-ours")


CHANGES = ["object patch", "object patch above", "transformer", "layer", "copy"]


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_encoder_is_pytorch(server: Server, what: str) -> None:
    """No answer from an engine that was built for other parts; a copy has PyTorch's alone."""
    seed = 50 + CHANGES.index(what)
    graph = Graph()
    base = graph.clip("sd1", seed)
    graph.keep(graph.encode(graph.octavo(base), "a cat"), f"changed-{what}-before")
    server.run(graph)
    graph = Graph()
    base, other = graph.clip("sd1", seed), graph.clip("sd1", 49)
    for name, clip in (("ours", graph.octavo(base)), ("plain", base)):
        changed = graph.add("OctavoTestChange", clip=clip, other=other, what=what)
        graph.keep(graph.encode(changed, "a cat"), f"changed-{what}-{name}")
    server.run(graph)
    assert_alike(server, f"changed-{what}-plain", f"changed-{what}-ours", exact=True)
    before, after = (server.kept(f"changed-{what}-{n}")["0.cond"] for n in ("before", "ours"))
    assert (float(cosines(before, after).mean()) > 0.99) == (what == "copy")


def test_bypass_lora_is_pytorch(server: Server) -> None:
    graph = Graph()
    base = graph.clip("sd1")
    both(graph, base, "bypass", lambda c: graph.encode(graph.lora(c, 1, bypass=True), "a cat"))
    clip = graph.lora(graph.octavo(base), 1, bypass=True)
    state = server.state(clip, graph.encode(clip, "a dog"), graph)
    assert "bypass_lora" in state["served"]["clip_l"]["why_host"]
    assert_alike(server, "bypass-plain", "bypass-ours", exact=True)
    # It leaves its marks on the modules, and the engine serves the next prompt all the same.
    after = Graph()
    ours = after.octavo(after.clip("sd1"))
    state = server.state(ours, after.encode(ours, "a cat after all"), after)
    assert state["served"]["clip_l"] == {"engine": "torch_fp8", "why_host": ""}


@pytest.mark.parametrize("family", ["sd1", "sdxl"])
@pytest.mark.parametrize("schedule", [False, True])
def test_hooks_are_pytorch(server: Server, family: str, schedule: bool) -> None:
    first = Graph()
    name = f"hook_{family}.safetensors"
    first.add("OctavoTestLoraFile", clip=first.clip(family), seed=1, name=name)
    server.run(first)
    graph = Graph()
    hooks = graph.add("CreateHookLora", lora_name=name, strength_model=1.0, strength_clip=1.0)
    keyframes = graph.add(
        "CreateHookKeyframesInterpolated", strength_start=1.0, strength_end=0.2,
        interpolation="linear", start_percent=0.0, end_percent=1.0, keyframes_count=3,
        print_keyframes=False,
    )  # fmt: skip
    hooks = graph.add("SetHookKeyframes", hooks=hooks, hook_kf=keyframes)

    def make(c: Ref) -> Ref:
        hooked = graph.add(
            "SetClipHooks", clip=c, hooks=hooks, apply_to_conds=True, schedule_clip=schedule
        )
        return graph.encode(hooked, "a cat")

    base = graph.clip(family)
    key = f"hooks-{family}-{schedule}"
    both(graph, base, key, make)
    after = graph.octavo(base)
    unhooked = graph.encode(after, "a cat")
    graph.keep(unhooked, f"{key}-after")
    graph.keep(graph.encode(base, "a cat"), f"{key}-base")
    state = server.state(after, unhooked, graph)
    assert all(not s["why_host"] for s in state["served"].values()), state
    assert_alike(server, f"{key}-plain", f"{key}-ours", exact=True)
    assert_alike(server, f"{key}-base", f"{key}-after")
    if schedule:
        assert len(server.facts(f"{key}-ours")) > 1


def test_merges_and_multiplied_attention(server: Server) -> None:
    graph = Graph()
    one, two = graph.clip("sd1", 0), graph.clip("sd1", 7)
    ours = graph.octavo(one)
    makers = {
        "simple": lambda c: graph.add("CLIPMergeSimple", clip1=c, clip2=two, ratio=0.6),
        "add": lambda c: graph.add("CLIPMergeAdd", clip1=c, clip2=two),
        "subtract": lambda c: graph.add("CLIPMergeSubtract", clip1=c, clip2=two, multiplier=0.3),
        "attention": lambda c: graph.add(
            "CLIPAttentionMultiply", clip=c, q=1.8, k=1.5, v=1.4, out=0.4
        ),
    }
    for name, make in makers.items():
        graph.keep(graph.encode(make(one), "a cat"), f"merge-{name}-plain")
        graph.keep(graph.encode(make(ours), "a cat"), f"merge-{name}-ours")
        graph.keep(graph.encode(graph.octavo(make(one)), "a cat"), f"merge-{name}-before")
    # Ours as the second of a merge that plain ComfyUI encodes.
    for name, second in (("plain", one), ("ours", ours)):
        merged = graph.add("CLIPMergeSimple", clip1=two, clip2=second, ratio=0.5)
        graph.keep(graph.encode(merged, "a cat"), f"merge-second-{name}")
    graph.keep(graph.encode(one, "a cat"), "merge-none")
    server.run(graph)
    states = {}
    for name, make in makers.items():
        again = make(graph.octavo(one))
        states[name] = server.state(again, graph.encode(again, f"a dog {name}"), graph)
    base = server.kept("merge-none")["0.cond"]
    for name in makers:
        # A sum of two encoders is far from either: FP8 may miss the floor, PyTorch answers then.
        state = states[name]["served"]["clip_l"]["why_host"]
        exact = "patched weights" in state
        assert exact or not state, (name, state)
        assert_alike(server, f"merge-{name}-plain", f"merge-{name}-ours", exact=exact)
        assert_alike(server, f"merge-{name}-before", f"merge-{name}-ours", exact=True)
        assert float(cosines(base, server.kept(f"merge-{name}-ours")["0.cond"]).min()) < 0.98, name
    assert_alike(server, "merge-second-plain", "merge-second-ours", exact=True)


def test_saving_writes_what_it_wrote_before(server: Server) -> None:
    graph = Graph()
    base = graph.clip("sdxl")
    ours = graph.octavo(base)
    first = graph.encode(ours, "a cat")  # engines are loaded while the file is written
    graph.keep(first, "saved-first")
    for name, clip in (("plain", base), ("ours", ours)):
        for kind, saved in (("base", clip), ("lora", graph.lora(clip, 1))):
            graph.add("CLIPSave", clip=saved, filename_prefix=f"saved/{name}-{kind}")
    server.run(graph)
    folder = server.base / "output" / "saved"
    plain = sorted(p for p in folder.iterdir() if p.name.startswith("plain"))
    assert len(plain) == 4  # L and G, with and without LoRA
    for path in plain:
        other = folder / path.name.replace("plain", "ours")
        a, b = load_file(path), load_file(other)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[k], b[k]) for k in a), path.name


def test_two_branches_and_third_party_calls(server: Server) -> None:
    graph = Graph()
    base = graph.clip("sdxl")
    ours = graph.octavo(base)
    branch = graph.lora(ours, 3)
    for i in range(3):
        graph.keep(graph.encode(ours, f"a cat {i}"), f"branch-{i}-ours")
        graph.keep(graph.encode(branch, f"a cat {i}"), f"branch-{i}-lora-ours")
        graph.keep(graph.encode(base, f"a cat {i}"), f"branch-{i}-plain")
        graph.keep(graph.encode(graph.lora(base, 3), f"a cat {i}"), f"branch-{i}-lora-plain")
    both(
        graph, base, "direct",
        lambda c: graph.add("OctavoTestEncode", clip=c, text="a (cat:1.4)", how="direct"),
    )  # fmt: skip
    server.run(graph)
    for i in range(3):
        assert_alike(server, f"branch-{i}-plain", f"branch-{i}-ours")
        assert_alike(server, f"branch-{i}-lora-plain", f"branch-{i}-lora-ours")
    assert_alike(server, "direct-plain", "direct-ours")


def test_nothing_handed_out_changes_later(server: Server) -> None:
    """B03: a conditioning that another prompt's encode would overwrite."""
    graph = Graph()
    ours = graph.octavo(graph.clip("sdxl"))
    first = graph.encode(ours, "a cat")
    graph.keep(first, "held-1")
    others = [graph.encode(ours, f"number {i}") for i in range(4)]
    joined = first
    for other in others:
        joined = graph.add("ConditioningCombine", conditioning_1=joined, conditioning_2=other)
    graph.keep(joined, "held-2")
    server.run(graph)
    assert torch.equal(server.kept("held-1")["0.cond"], server.kept("held-2")["0.cond"])


def test_memory_comes_back(server: Server) -> None:
    """'Unload models' frees the engines; the next prompt loads them again and answers the same."""
    results = []
    for i in range(2):
        graph = Graph()
        ours = graph.octavo(graph.clip("sdxl", 61))  # one that no LoRA went to
        conditioning = graph.encode(ours, "a cat" + " " * i)
        graph.keep(conditioning, f"memory-{i}")
        state = server.state(ours, conditioning, graph)
        results.append(state["bytes"])
        server.post("/free", {"unload_models": True, "free_memory": False})
    assert results[0] > 0 and results[0] == results[1]
    a, b = (server.kept(f"memory-{i}")["0.cond"] for i in range(2))
    assert torch.equal(a, b)


def test_patched_sets_go_first(server: Server) -> None:
    """Under pressure what is kept for later goes before what serves, then the largest engine."""
    graph = Graph()
    ours = graph.octavo(graph.clip("sdxl", 51))
    conditioning = graph.encode(graph.lora(ours, 1), "a cat")
    node = graph.add("OctavoTestPress", clip=ours, after=conditioning)[0]
    steps = json.loads(server.run(graph)[node]["text"][0])
    assert [(s["sets"], s["loaded"]) for s in steps] == [(0, 2), (0, 1), (0, 0)]
    assert all(s["freed"] == s["really"] > 0 for s in steps)
    again = Graph()
    clip = again.octavo(again.clip("sdxl", 51))
    again.keep(again.encode(again.lora(clip, 1), "a cat"), "pressed-again")
    graph.keep(conditioning, "pressed-before")
    server.run(graph)
    server.run(again)
    assert torch.equal(*(server.kept(f"pressed-{n}")["0.cond"] for n in ("before", "again")))


def test_a_cpu_is_left_to_pytorch(server: Server) -> None:
    graph = Graph()
    clip = graph.clip("sd1", 11, simulate=False)
    both(graph, clip, "cpu", lambda c: graph.encode(c, "a cat"))
    server.run(graph)
    assert_alike(server, "cpu-plain", "cpu-ours", exact=True)


def test_a_floor_that_nothing_reaches_is_pytorch(server: Server) -> None:
    graph = Graph()
    clip = graph.clip("sd1")
    both(graph, clip, "floor", lambda c: graph.encode(c, "a cat"), similarity_floor=0.9999)
    ours = graph.octavo(clip, similarity_floor=0.9999)
    state = server.state(ours, graph.encode(ours, "a dog"), graph)
    served = state["served"]["clip_l"]
    # bf16 may reach it; if it does not, PyTorch answers and the node says why.
    if served["engine"] == "host":
        assert "0.9999" in state["lines"][0]
        assert_alike(server, "floor-plain", "floor-ours", exact=True)
    else:
        low = cosines(server.kept("floor-plain")["0.cond"], server.kept("floor-ours")["0.cond"])
        assert float(low.mean()) >= 0.9999


@pytest.fixture
def _disk(server: Server) -> Iterator[None]:
    yield
    graph = Graph()
    clip = graph.add("OctavoTestDisk", clip=graph.clip("sd1"), mode="fine")
    graph.keep(graph.encode(clip, "fine again"), "disk-fine")
    server.run(graph)


@pytest.mark.usefixtures("_disk")
@pytest.mark.parametrize(
    ("mode", "reason", "seed"),
    [("full", "the disk is full", 41), ("read-only", "it cannot be written", 42)],
)
def test_a_cache_that_cannot_be_written(server: Server, mode: str, reason: str, seed: int) -> None:
    """PyTorch answers, the node says why, and no half-written file stays."""
    cache = server.base / "models" / "octavo"
    before = {p for p in cache.rglob("*") if p.suffix != ".lock"}
    graph = Graph()
    base = graph.clip("sd1", seed)
    bad = graph.add("OctavoTestDisk", clip=base, mode=mode)
    graph.keep(graph.encode(base, "a cat"), f"disk-{mode}-plain")
    ours = graph.octavo(bad)
    conditioning = graph.encode(ours, "a cat")
    graph.keep(conditioning, f"disk-{mode}-ours")
    state = server.state(ours, conditioning, graph)
    assert state["served"]["clip_l"]["engine"] == "host"
    assert reason in state["lines"][0] and reason in state["served"]["clip_l"]["why_host"]
    assert_alike(server, f"disk-{mode}-plain", f"disk-{mode}-ours", exact=True)
    assert {p for p in cache.rglob("*") if p.suffix != ".lock"} - before == set()


@pytest.mark.usefixtures("_disk")
def test_a_bad_setting_of_the_cache_is_pytorch(server: Server) -> None:
    graph = Graph()
    base = graph.clip("sd1", 45)
    bad = graph.add("OctavoTestDisk", clip=base, mode="budget")
    for name, clip in (("plain", base), ("ours", graph.octavo(bad))):
        graph.keep(graph.encode(clip, "a cat"), f"disk-budget-{name}")
    server.run(graph)
    assert_alike(server, "disk-budget-plain", "disk-budget-ours", exact=True)


@pytest.mark.usefixtures("_disk")
def test_what_a_read_only_cache_holds_is_used(server: Server) -> None:
    first = Graph()
    ours = first.octavo(first.clip("sd1", 43))
    first.keep(first.encode(ours, "a cat"), "filled")
    server.run(first)
    graph = Graph()
    bad = graph.add("OctavoTestDisk", clip=graph.clip("sd1", 43), mode="read-only")
    ours = graph.octavo(bad, similarity_floor=0.5)  # other settings, so it is all done anew
    conditioning = graph.encode(ours, "a cat")
    graph.keep(conditioning, "filled-read-only")
    state = server.state(ours, conditioning, graph)
    assert state["served"]["clip_l"] == {"engine": "torch_fp8", "why_host": ""}
    a, b = server.kept("filled")["0.cond"], server.kept("filled-read-only")["0.cond"]
    assert torch.equal(a, b)


def test_report_and_environment(server: Server) -> None:
    graph = Graph()
    ours = graph.octavo(graph.clip("sdxl"))
    report = graph.add("OctavoReport", clip=ours, prompts="a cat\na (dog:1.2)", repeats=2)
    environment = graph.add("OctavoEnvironment", cache="verify")
    outputs = server.run(graph)
    text = outputs[report[0]]["text"][0]
    assert "clip_l" in text and "clip_g" in text and "a (dog:1.2)" in text
    assert outputs[report[0]]["images"][0]["filename"].endswith(".png")
    text = outputs[environment[0]]["text"][0]
    assert str(server.base / "models" / "octavo") in text and " 0 faults" in text


def test_a_clip_without_octavo_has_no_report(server: Server) -> None:
    graph = Graph()
    graph.add("OctavoReport", clip=graph.clip("sd1"), prompts="a cat", repeats=1)
    result = server.wait(server.start(graph))
    assert result["status"]["status_str"] == "error"
    assert "FP8 Text Encoder" in str(result["status"]["messages"])


def test_saved_names_stay_in_their_folder(server: Server) -> None:
    graph = Graph()
    ours = graph.octavo(graph.clip("sd1"))
    node = graph.add("OctavoSaveTextEncoder", clip=ours, name="../../evil/na:me")
    files = server.run(graph)[node[0]]["text"][0].splitlines()
    assert files and all("/" not in f and "\\" not in f for f in files)
    assert all((server.base / "models" / "text_encoders" / f).is_file() for f in files)
