# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The real ComfyUI on a GPU, in each of its ways to manage memory (tests/gpu/comfyui_run.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.comfyui, pytest.mark.timeout(2400)]

MODES = {"dynamic": [], "legacy": ["--disable-dynamic-vram"], "gpu only": ["--gpu-only"]}
# Whole CLIPTextEncode against PyTorch on an H200. With dynamic VRAM, the default there, most of
# the unpatched call is loading; without it the host's own work around the encoder is what remains.
FASTER = {"sd1": 4.0, "sdxl": 10.0, "flux": 15.0, "flux_fp8": 15.0, "sd3": 10.0}
FASTER_WITHOUT_DYNAMIC = {"sd1": 2.0, "sdxl": 3.0, "flux": 10.0, "flux_fp8": 10.0, "sd3": 7.0}
# To the first result of a LoRA that is new, after another one; and without dynamic VRAM. On SDXL
# 266 to 301 ms were measured, 300 are aimed at.
LORA_MS, LORA_MS_WITHOUT_DYNAMIC = 330.0, 450.0
KEPT_LORA_MS = 150.0  # of one that was there before, or of none
# A new set beside the engine, while it is made: its FP8 weights and about two blocks more.
LORA_PEAK_MB = {"sd1": 220.0, "sdxl": 950.0}
RELOAD_MS = {"sd1": 400.0, "sdxl": 900.0}
# What stays after everything is unloaded: CUDA's code and workspaces, once in a process.
AFTER_MB = {"sd1": 450.0, "sdxl": 60.0}
HELD_MB = 60.0  # the same in tensors of PyTorch: cuBLAS's workspaces and the results kept here
# With T5-XXL. Ready again: all engines loaded from RAM, and the prompt.
T5_READY_MS, T5_LEFT_MB = 1400.0, 50.0
GROWTH_MB = 10.0  # over 200 prompts of shapes that were all seen before


@pytest.fixture(scope="module", params=MODES)
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    script = Path(__file__).with_name("comfyui_run.py")
    command = [sys.executable, str(script), os.environ["OCTAVO_COMFYUI"], *MODES[request.param]]
    cache = str(tmp_path_factory.mktemp("cache"))
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OCTAVO_CACHE": cache}
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and lines, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("RESULT "))


def served(measured: Any, family: str) -> Any:
    """What was measured of `family`, which an engine served and served right."""
    found = measured[family]
    print(json.dumps(found, indent=1))
    assert all(not why for why in found["why_host"].values()), found["why_host"]
    for values in (found["similarity"], found["lora_similarity"]):
        assert values["token_mean"] >= 0.99 and values["token_min"] >= 0.95
        assert values["pooled"] >= 0.99
    return found


def is_fast_enough(measured: Any, family: str) -> bool:
    faster = FASTER if measured["dynamic"] else FASTER_WITHOUT_DYNAMIC
    return bool(measured[family]["ratio"] >= faster[family])


def moves_weights(measured: Any) -> bool:
    """With --gpu-only what PyTorch does not use stays on the GPU, too."""
    return "--gpu-only" not in measured["options"]


@pytest.mark.parametrize("family", ["sd1", "sdxl"])
def test_comfyui_on_a_gpu(measured: Any, family: str) -> None:
    found, dynamic = served(measured, family), measured["dynamic"]
    assert found["lora_effect"] < found["lora_similarity"]["token_mean"] - 0.01
    assert found["lora_same"] and found["none_same"] and found["stable"]
    assert found["same_after_unload"]
    assert found["lora_exact"], "a set is not what one weight after the other gives"
    assert abs(found["growth_mb"]) < GROWTH_MB and found["after_held_mb"] < HELD_MB
    assert found["after_mb"] < AFTER_MB[family] or not dynamic
    both = found["engines_mb"] + found["loaded_pytorch_mb"]
    assert both < 0.9 * found["weights_mb"] or not moves_weights(measured)
    assert is_fast_enough(measured, family)
    assert found["lora_ms"]["b"] < (LORA_MS if dynamic else LORA_MS_WITHOUT_DYNAMIC)
    assert all(found["lora_ms"][n] < KEPT_LORA_MS for n in ("a again", "none", "a kept"))
    assert all(peak < LORA_PEAK_MB[family] for peak in found["lora_peak_mb"].values())
    assert found["reload_ms"] < RELOAD_MS[family]


@pytest.mark.parametrize("family", ["flux", "flux_fp8", "sd3"])
def test_t5_on_a_gpu(measured: Any, family: str) -> None:
    """T5-XXL from a 16-bit file and from one that is FP8 already, alone and beside both CLIPs."""
    found = served(measured, family)
    assert found["lora_effect"] < found["lora_similarity"]["token_mean"] - 0.005
    assert found["lora_same"] and found["none_same"]
    assert found["own_codes"] is (True if family == "flux_fp8" else None)
    assert is_fast_enough(measured, family)
    most = (1.2 if family == "flux_fp8" else 0.6) * found["pytorch_mb"]
    assert found["octavo_mb"] < most or not moves_weights(measured)
    for cycle in found["cycles"]:
        assert cycle["engines_mb"] == 0 and cycle["same"]
        assert cycle["ready_ms"] < T5_READY_MS
    left = [cycle["given_back_mb"] for cycle in found["cycles"]]
    assert max(left) - left[0] < T5_LEFT_MB and found["after_held_mb"] < HELD_MB
    assert found["after_mb"] - left[0] < T5_LEFT_MB or not measured["dynamic"]
    assert abs(found["growth_mb"]) < GROWTH_MB
