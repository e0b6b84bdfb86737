# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Full-size files through ComfyUI's own CLIPLoader: FP8 checkpoints, saving, interruption."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch
from comfy_server import Graph, Ref
from octavo.compile import build
from octavo.engine_cache import EngineCache
from octavo.recipes import load_recipe
from octavo.seeded import CLIP_L, seeded_tensors
from safetensors.torch import save_file
from test_graphs import cosines

if TYPE_CHECKING:
    from comfy_server import Server

pytestmark = [pytest.mark.comfyui, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def files(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A 16-bit CLIP-L and the FP8 checkpoint that `octavo build --output` makes of it."""
    folder = server.base / "models" / "text_encoders"
    save_file(dict(seeded_tensors(CLIP_L, outliers=False)), folder / "clip_l.safetensors")
    build(
        folder / "clip_l.safetensors",
        [],
        recipe=load_recipe("fp8").with_options(prompts=4),
        cache=EngineCache(tmp_path_factory.mktemp("cache")),
        output=folder / "clip_l_codes.safetensors",
    )
    return {"half": "clip_l.safetensors", "codes": "clip_l_codes.safetensors"}


def load(graph: Graph, name: str) -> Ref:
    return graph.add(
        "CLIPLoader", clip_name=name, type="stable_diffusion", device="default"
    )  # fmt: skip


def test_a_checkpoint_that_comfyui_misreads_is_named(server: Server, files: dict[str, str]) -> None:
    """ComfyUI 0.33 drops the scales of an FP8 CLIP. The day it reads them, this test says so."""
    graph = Graph()
    graph.clip("sd1")
    graph.keep(graph.encode(graph.clip("sd1"), "on"), "codes-on")
    for kind, name in files.items():
        graph.keep(graph.encode(load(graph, name), "a photo of a cat"), f"file-{kind}")
    ours = graph.octavo(load(graph, files["codes"]))
    state = server.state(ours, graph.encode(ours, "a cat"), graph)
    half, codes = server.kept("file-half")["0.cond"], server.kept("file-codes")["0.cond"]
    assert float(cosines(half, codes).mean()) < 0.9, "ComfyUI reads the scales now: use them"
    assert not state["served"]


def test_interruption_and_what_comes_after(server: Server, files: dict[str, str]) -> None:
    """Cancel while it calibrates: nothing is left behind, and the next prompt is served."""
    graph = Graph()
    graph.clip("sd1")  # switches the simulated engine on
    graph.keep(graph.encode(graph.clip("sd1"), "on"), "interrupt-on")
    server.run(graph)
    graph = Graph()
    ours = graph.octavo(load(graph, files["half"]))
    conditioning = graph.encode(ours, "a photo of a cat")
    graph.keep(conditioning, "interrupt")
    prompt = server.start(graph)
    time.sleep(4)
    start = time.monotonic()
    server.post("/interrupt", {})
    result = server.wait(prompt)
    assert time.monotonic() - start < 20
    kinds = [message[0] for message in result["status"]["messages"]]
    assert "execution_interrupted" in kinds, kinds
    state = server.state(ours, conditioning, graph)
    assert state["served"]["clip_l"] == {"engine": "torch_fp8", "why_host": ""}


def test_saving_and_loading_again(server: Server, files: dict[str, str]) -> None:
    """Our node's file in plain ComfyUI, with a LoRA in it; and our node on that file."""
    graph = Graph()
    base = load(graph, files["half"])
    patched = graph.lora(graph.octavo(base), 1)
    saved = graph.add("OctavoSaveTextEncoder", clip=patched, name="patched")
    graph.keep(graph.encode(graph.lora(base, 1), "a cat"), "saved-lora-plain")
    graph.keep(graph.encode(base, "a cat"), "saved-base")
    name = server.run(graph)[saved[0]]["text"][0]
    again = Graph()
    quantized = load(again, name)
    again.keep(again.encode(quantized, "a cat"), "saved-lora-file")
    ours = again.octavo(quantized)
    conditioning = again.encode(ours, "a cat")
    again.keep(conditioning, "saved-lora-ours")
    state = server.state(ours, conditioning, again)
    assert state["served"]["clip_l"] == {"engine": "torch_fp8", "why_host": ""}
    plain, file, node, without = (
        server.kept(f"saved-{n}")["0.cond"]
        for n in ("lora-plain", "lora-file", "lora-ours", "base")
    )
    assert float(cosines(plain, file).min()) > 0.97
    assert float(cosines(file, node).min()) > 0.97
    assert float(cosines(plain, without).mean()) < float(cosines(plain, file).mean()) - 0.01
    assert torch.isfinite(node).all()
