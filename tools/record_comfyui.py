# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Record what ComfyUI calls CLIP and T5 with and what they return, for tests without ComfyUI.

    python tools/record_comfyui.py COMFYUI_CHECKOUT [FILE]

Runs the real `SDClipModel`, `CLIPTextModel` and `T5` on the CPU over tiny seeded weights, for every
form of request that ComfyUI's wrappers make, and writes calls, weights and results into one file
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

T5_CONFIG = {
    "d_model": 16,
    "num_heads": 2,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 3,
    "vocab_size": 40,
    "dense_act_fn": "gelu_pytorch_tanh",
    "is_gated_act": True,
    "model_type": "t5",
}
T5_FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "flux": ({}, {}),
    "mochi": ({"enable_attention_masks": True, "return_attention_masks": True}, {}),
    "wan": ({"enable_attention_masks": True, "zero_out_masked": True}, {}),
    "skip 2": ({}, {"layer": -2}),
}
# An end token in the middle, none at all, one at the start: what follows it is masked.
T5_ROWS = [[5, 6, 7, 1] + [0] * 5, [5, 6, 7, 8, 9, 10, 11, 12, 13], [1] + [0] * 8]


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
    import comfy.text_encoders.t5

    patcher = comfy.model_patcher.ModelPatcher
    methods = (
        "partially_load", "partially_unload", "detach", "unpatch_model", "patch_model",
        "set_injections", "set_model_patch", "add_callback_with_key",
    )  # fmt: skip
    found = {
        "forward": comfy.clip_model.CLIPTextModel_.forward,
        "t5_forward": comfy.text_encoders.t5.T5.forward,
        "t5_stack_forward": comfy.text_encoders.t5.T5Stack.forward,
        "calculate_weight": comfy.lora.calculate_weight,
        "get_key_weight": comfy.model_patcher.get_key_weight,
        **{name: getattr(patcher, name) for name in methods},
    }
    return {name: list(inspect.signature(value).parameters) for name, value in found.items()}


def called(model: Any, rows: list[list[int]]) -> tuple[dict[str, Any], list[Any]]:
    """({argument: value} of the call that `model` makes to its transformer, what that returns)."""
    seen: dict[str, Any] = {}
    original = model.transformer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        # Copies: T5 adds to its embeddings in place, and the caller zeroes what is masked so.
        given = {**{f"args.{i}": a for i, a in enumerate(args)}, **kwargs}
        copies = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in given.items()}
        result = original(*args, **kwargs)
        seen.update(given=copies, result=[None if r is None else r.clone() for r in result])
        return result

    model.transformer.forward = forward
    with torch.no_grad():
        model(rows)
    return seen["given"], seen["result"]


def described(
    form: str, given: dict[str, Any], results: list[Any], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """A call as JSON, its tensors under `form` in `tensors`."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            tensors[f"{form}/{name}"] = value.contiguous()
            found[name] = "tensor"
        else:
            found[name] = str(value) if isinstance(value, torch.dtype) else value
    found["results"] = [value is not None for value in results]
    for i, value in enumerate(results):
        if value is not None:
            tensors[f"{form}/result.{i}"] = value.contiguous()
    return found


def weighted(model: Any) -> dict[str, torch.Tensor]:
    """Seed the weights of the transformer of `model`: the same at each call."""
    state = model.transformer.state_dict()
    weights = {n: seeded(t.shape, i, n) for i, (n, t) in enumerate(state.items())}
    model.transformer.load_state_dict(weights)
    return weights


def record(checkout: Path, target: Path) -> None:
    sys.path.insert(0, str(checkout))
    sys.argv = sys.argv[:1]
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    import comfy.text_encoders.t5
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
        weights = weighted(model)
        model.set_clip_options(options)
        calls[form] = described(form, *called(model, ROWS), tensors)
        if form == "last":
            table = "text_model.embeddings.token_embedding.weight"
            tensors.update({f"weights/{n}": w for n, w in weights.items() if n != table})
    t5_calls: dict[str, Any] = {}
    for form, (arguments, options) in T5_FORMS.items():
        t5 = SDClipModel(
            dtype=torch.float32,
            textmodel_json_config=dict(T5_CONFIG),
            special_tokens={"end": 1, "pad": 0},
            model_class=comfy.text_encoders.t5.T5,
            **arguments,
        )
        weights = weighted(t5)
        t5.set_clip_options(options)
        t5_calls[form] = described(f"t5/{form}", *called(t5, T5_ROWS), tensors)
        tensors.update({f"t5/weights/{n}": w for n, w in weights.items()})
    # What no prompt asks for and ComfyUI still answers: a row with nothing to attend to.
    given = {"args.0": None, "args.1": torch.tensor([[0, 0, 0, 0], [1, 0, 1, 0]])}
    keywords = {
        "embeds": seeded(torch.Size((2, 4, 16)), 99, "embeds"),
        "num_tokens": [0, 2],
        "intermediate_output": None,
        "final_layer_norm_intermediate": True,
        "dtype": torch.float32,
        "embeds_info": [],
    }
    with torch.no_grad():
        asked = {**keywords, "embeds": keywords["embeds"].clone()}
        results = list(type(t5.transformer).forward(t5.transformer, None, given["args.1"], **asked))
    t5_calls["masked row"] = described("t5/masked row", {**given, **keywords}, results, tensors)
    facts = {
        "comfyui": comfyui_version.__version__,
        "config": CONFIG,
        "calls": calls,
        "t5_config": T5_CONFIG,
        "t5_calls": t5_calls,
        "names": names(model),
        "signatures": signatures(),
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target, {"facts": json.dumps(facts)})
    count = len(calls) + len(t5_calls)
    print(f"{target}: {count} calls of ComfyUI {comfyui_version.__version__}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    place = Path(__file__).parents[1] / "tests/hosts/data/comfyui_calls.safetensors"
    record(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) == 3 else place)
