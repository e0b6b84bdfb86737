# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""ComfyUI started in other ways: what is served, and what nothing may change afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from comfy_server import Graph, serve
from test_graphs import assert_alike, cosines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from comfy_server import Server

pytestmark = [pytest.mark.comfyui, pytest.mark.timeout(600)]

# Arguments of ours, and of those that exclude --cpu and are only set (tests/comfyui/pack).
WAYS = {
    "gpu only": ([], "gpu_only"),
    "low vram": ([], "lowvram"),
    "no vram": ([], "novram disable_pinned_memory"),
    "nothing is kept": (["--disable-smart-memory", "--cache-none"], ""),
}


@pytest.fixture(scope="module", params=WAYS)
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    arguments, only_set = WAYS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_TEST_ARGS", only_set)
        with serve(tmp_path_factory.mktemp("comfyui"), "--cpu", *arguments) as running:
            yield running


def test_started_in_another_way(started: Server) -> None:
    graph = Graph()
    base = graph.clip("sdxl")
    ours = graph.octavo(base)
    first = graph.encode(ours, "a (red:1.3) cat")
    graph.keep(first, "first-before")
    graph.keep(graph.encode(base, "a (red:1.3) cat"), "first-plain")
    graph.keep(graph.encode(graph.lora(base, 1), "a cat"), "lora-plain")
    lora = graph.lora(ours, 1)
    graph.keep(graph.encode(lora, "a cat"), "lora-ours")
    others = first
    for i in range(3):  # what was handed out must not change by them (a static buffer would)
        other = graph.encode(ours, f"number {i}")
        others = graph.add("ConditioningCombine", conditioning_1=others, conditioning_2=other)
    graph.keep(others, "first-after")
    last = graph.encode(ours, "the last")
    state = started.state(ours, last, graph)
    for encoder in state["served"].values():
        assert encoder == {"engine": "torch_fp8", "why_host": ""}
    started.post("/free", {"unload_models": True, "free_memory": False})
    again = Graph()
    again.keep(again.encode(again.octavo(again.clip("sdxl")), "a (red:1.3) cat"), "first-again")
    started.run(again)
    kept = {n: started.kept(f"first-{n}")["0.cond"] for n in ("before", "after", "again", "plain")}
    assert torch.equal(kept["before"], kept["after"]) and torch.equal(kept["before"], kept["again"])
    low = float(cosines(kept["plain"], kept["before"]).min())
    assert low > 0.98 and not torch.equal(kept["plain"], kept["before"])
    assert_alike(started, "lora-plain", "lora-ours")
