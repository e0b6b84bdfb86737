# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Record what ComfyUI calls a CLIP text model with and what it returns, for tests without ComfyUI.

    python tools/record_comfyui.py COMFYUI_CHECKOUT [FILE]

Runs the real `SDClipModel` and `CLIPTextModel` on the CPU over tiny seeded weights, for every form
of request that ComfyUI's wrappers make, and writes calls, weights and results into one file
(default: tests/hosts/data/comfyui_calls.safetensors). Needs a Python with ComfyUI's requirements.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch

CONFIG = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "eos_token_id": 49407,
}
# name -> (SDClipModel arguments, options set before the call)
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "last": ({}, {}),
    "unprojected": ({"return_projected_pooled": False}, {}),
    "penultimate": ({"layer": "hidden", "layer_idx": -2, "layer_norm_hidden_state": False}, {}),
    "penultimate normed": ({"layer": "hidden", "layer_idx": -2}, {}),
    "skip 1": ({}, {"layer": -1}),
    "skip 3": ({}, {"layer": -3}),
    "skip beyond": ({}, {"layer": -24}),
    "layer 0": ({}, {"layer": 0}),
    "masked": ({"enable_attention_masks": True}, {}),
    "masked and zeroed": ({"enable_attention_masks": True, "zero_out_masked": True}, {}),
    "all": ({"layer": "all"}, {}),
    "all unnormed": ({"layer": "all", "layer_norm_hidden_state": False}, {}),
}
ROWS = [
    [49406, 320, 2368, 49407] + [49407] * 73,
    [49406, 49407] + [49407] * 75,
]


def seeded(shape: torch.Size, seed: int, name: str) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if "norm" in name and name.endswith("weight"):
        return 1 + 0.1 * values
    return values * (shape[-1] ** -0.5 if len(shape) > 1 else 0.02)


def names(model: torch.nn.Module) -> dict[str, list[str]]:
    """What ComfyUI's objects have, so that a test can check what Octavo asks of them."""
    import comfy.lora
    import comfy.model_management
    import comfy.model_patcher
    import comfy.patcher_extension
    import comfy.weight_adapter

    patcher = comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))
    found = {
        "patcher": patcher,
        "dynamic": comfy.model_patcher.ModelPatcherDynamic,
        "model": patcher.model,
        "management": comfy.model_management,
        "encoder": model,
        "callbacks": comfy.patcher_extension.CallbacksMP,
    }
    return {name: sorted(dir(value)) for name, value in found.items()}


def signatures() -> dict[str, list[str]]:
    """Parameter names of what Octavo calls, replaces or overrides."""
    import comfy.clip_model
    import comfy.lora
    import comfy.model_patcher

    patcher = comfy.model_patcher.ModelPatcher
    methods = (
        "partially_load", "partially_unload", "detach", "unpatch_model", "patch_model",
        "set_injections", "set_model_patch", "add_callback_with_key",
    )  # fmt: skip
    found = {
        "forward": comfy.clip_model.CLIPTextModel_.forward,
        "calculate_weight": comfy.lora.calculate_weight,
        "get_key_weight": comfy.model_patcher.get_key_weight,
        **{name: getattr(patcher, name) for name in methods},
    }
    return {name: list(inspect.signature(value).parameters) for name, value in found.items()}


def record(checkout: Path, target: Path) -> None:
    sys.path.insert(0, str(checkout))
    sys.argv = sys.argv[:1]
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    import comfyui_version
    from comfy.sd1_clip import SDClipModel
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    calls: dict[str, Any] = {}
    for form, (arguments, options) in FORMS.items():
        model = SDClipModel(
            dtype=torch.float32,
            model_options={"clip_l_model_config": dict(CONFIG)},
            **arguments,
        )
        state = model.transformer.state_dict()
        weights = {n: seeded(t.shape, i, n) for i, (n, t) in enumerate(state.items())}
        model.transformer.load_state_dict(weights)
        model.set_clip_options(options)
        seen: dict[str, Any] = {}
        original = model.transformer.forward

        def forward(*args: Any, _original: Any = original, _seen: Any = seen, **kwargs: Any) -> Any:
            result = _original(*args, **kwargs)
            # Copies: the caller zeroes what is masked in place.
            copies = [None if r is None else r.clone() for r in result]
            _seen.update(args=args, kwargs=kwargs, result=copies)
            return result

        model.transformer.forward = forward
        with torch.no_grad():
            model(ROWS)
        described: dict[str, Any] = {}
        given = {**{f"args.{i}": a for i, a in enumerate(seen["args"])}, **seen["kwargs"]}
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{form}/{name}"] = value.contiguous()
                described[name] = "tensor"
            else:
                described[name] = str(value) if isinstance(value, torch.dtype) else value
        described["results"] = []
        for i, value in enumerate(seen["result"]):
            described["results"].append(value is not None)
            if value is not None:
                tensors[f"{form}/result.{i}"] = value.contiguous()
        calls[form] = described
        if form == "last":
            table = "text_model.embeddings.token_embedding.weight"
            tensors.update({f"weights/{n}": w for n, w in weights.items() if n != table})
    facts = {
        "comfyui": comfyui_version.__version__,
        "config": CONFIG,
        "calls": calls,
        "names": names(model),
        "signatures": signatures(),
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target, {"facts": json.dumps(facts)})
    print(f"{target}: {len(calls)} calls of ComfyUI {comfyui_version.__version__}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    place = Path(__file__).parents[1] / "tests/hosts/data/comfyui_calls.safetensors"
    record(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) == 3 else place)
