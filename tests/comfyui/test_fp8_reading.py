# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""FP8 files mean to Octavo what they mean to ComfyUI: its loader and dequantization, bit by bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fp8_files as f
import packagings as p
import pytest
import torch
from octavo.checkpoints import detect

pytestmark = pytest.mark.comfyui

# What comfy/sd.py does with a text encoder's file, up to the weights of its linears.
SCRIPT = """
import sys
checkout, path, out = sys.argv[1:]
sys.path.insert(0, checkout)
sys.argv = ["main.py", "--cpu"]
import comfy.options
comfy.options.enable_args_parsing()
import comfy.ops, comfy.utils, torch
state, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
state, _ = comfy.utils.convert_old_quants(state, model_prefix="", metadata=metadata)
ops = comfy.ops.mixed_precision_ops({}, torch.float32, full_precision_mm=True)
found = {}
for stem in [n[:-7] for n in state if n.endswith(".weight") and state[n].dim() == 2]:
    rows, columns = state[stem + ".weight"].shape
    linear = ops.Linear(columns, rows, bias=False, device="cpu", dtype=torch.float32)
    own = {n[len(stem) + 1 :]: t for n, t in state.items() if n.startswith(stem + ".")}
    linear.load_state_dict(own, strict=False)
    scale = getattr(linear, "input_scale", None)
    weight = linear.convert_weight(linear.weight).detach().float()
    found[stem] = (weight, None if scale is None else scale.detach().float().item())
torch.save(found, out)
"""


def read_by_comfyui(path: Path) -> dict[str, tuple[torch.Tensor, float | None]]:
    python = os.environ.get("OCTAVO_COMFYUI_PYTHON", sys.executable)
    checkout = Path(os.environ["OCTAVO_COMFYUI"]).resolve()
    out = path.with_suffix(".out")
    command = [python, "-c", SCRIPT, str(checkout), str(path), str(out)]
    subprocess.run(command, check=True, timeout=300, cwd=path.parent, capture_output=True)
    found: dict[str, tuple[torch.Tensor, float | None]] = torch.load(out)
    return found


@pytest.mark.parametrize(
    "form", ["legacy", "two-element marker", "comfy_quant", "metadata", "plain"]
)
def test_the_same_weights_and_input_scales(form: str, tmp_path: Path) -> None:
    c = f.coded(p.t5_canonical(), p.SMALL_T5.linears())
    first = next(iter(c.codes))
    c.input_scales[first] = 1.0  # "none" in a legacy file, a scale elsewhere
    if form == "plain":
        tensors = {n: t.to(torch.float8_e4m3fn) for n, t in p.t5_canonical().items()}
    elif form == "two-element marker":
        tensors = f.legacy(c, torch.zeros(2))
    else:
        tensors = f.FORMATS[form](c)
    path = p.write(
        tmp_path / "x.safetensors", tensors, f.metadata(c) if form == "metadata" else None
    )
    theirs = read_by_comfyui(path)
    (weights,) = detect(path).encoders
    assert weights.quantized.keys() == p.SMALL_T5.linears().keys()
    for name, linear in weights.quantized.items():
        values, scale = theirs[name]
        assert torch.equal(weights.read(name + ".weight"), values), name
        ours = linear.input_scale
        assert (None if ours is None else ours.item()) == scale, name
    assert torch.equal(weights.read("shared.weight").float(), theirs["shared"][0])
