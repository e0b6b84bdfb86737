# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The encoders alone against the real ComfyUI's forward: benchmarks/comfyui_forward.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

H200 = torch.cuda.is_available() and "H200" in torch.cuda.get_device_name()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.comfyui,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not H200, reason="the times are promised for an H200"),
]

ROOT = Path(__file__).resolve().parents[2]
# (encoder, shape) -> ms at most, times faster than ComfyUI's own forward in the same process.
# ComfyUI's time for CLIP is that of its Python, so the ratio depends on the CPU.
PROMISED = {
    ("clip_l", "1x77"): (0.34, 22.0),
    ("clip_g", "1x77"): (1.05, 18.0),
    # 4.8 and 2.6 ms and 24 times are aimed at; at these sizes machines differ by 7 %.
    ("t5_xxl", "1x512"): (5.4, 22.0),
    ("t5_xxl", "1x256"): (2.9, 22.0),
}
T5_OVER_BF16_GRAPH = 1.85  # of ComfyUI's own module, at 512 tokens
T5_READY_S = 1.0  # from host memory to the first result


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("forward")
    script, result = ROOT / "benchmarks" / "comfyui_forward.py", folder / "result.json"
    names = sorted({name for name, _ in PROMISED})
    subprocess.run(
        [sys.executable, str(script), os.environ["OCTAVO_COMFYUI"], str(result), *names],
        check=True,
        env={**os.environ, "OCTAVO_CACHE": str(folder / "cache")},
    )
    return json.loads(result.read_text())


@pytest.mark.parametrize(("name", "shape"), PROMISED)
def test_faster_than_comfyui(measured: Any, name: str, shape: str) -> None:
    found, (most, faster) = measured[name][shape], PROMISED[name, shape]
    print(name, shape, json.dumps(found))
    mean, least = found["cosine_to_comfyui"]
    assert mean >= (0.998 if name == "t5_xxl" else 0.985) and least >= 0.95
    assert found["octavo_ms"] <= most and found["ratio"] >= faster


def test_t5(measured: Any) -> None:
    found = measured["t5_xxl"]
    assert found["1x512"]["bf16_graph_ratio"] >= T5_OVER_BF16_GRAPH
    assert found["ready_after_rest_s"] < T5_READY_S
    assert found["vram_of_fp16_linears"] <= 0.53
