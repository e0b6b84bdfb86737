# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""CLIP-L, CLIP-G and T5-XXL on one GPU: ComfyUI's own forward against AcceleratedEncoder.

    python benchmarks/comfyui_forward.py CHECKOUT [RESULT.json] [clip_l clip_g t5_xxl]

CHECKOUT is a ComfyUI tree. One process, full size, seeded weights with outliers. Medians of wall
time around device synchronisation; also the time until new LoRA weights are served, and the memory
held.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if importlib.util.find_spec("octavo") is None:
    spec = importlib.util.spec_from_file_location(
        "octavo", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules["octavo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["octavo"])

import torch  # noqa: E402
from octavo.accelerated import AcceleratedEncoder, Patched  # noqa: E402
from octavo.bench import LiveHost, bench  # noqa: E402
from octavo.encoders.clip import PROJECTION  # noqa: E402
from octavo.seeded import CLIP_G, CLIP_L, T5_XXL, seeded_tensors  # noqa: E402

SPECS: dict[str, Any] = {"clip_l": CLIP_L, "clip_g": CLIP_G, "t5_xxl": T5_XXL}
CONFIGS = {
    "clip_l": "sd1_clip_config.json",
    "clip_g": "clip_config_bigg.json",
    "t5_xxl": "text_encoders/t5_config_xxl.json",
}
LENGTHS = {"clip_l": (77,), "clip_g": (77,), "t5_xxl": (512, 256)}
DEVICE = torch.device("cuda:0")


def median_ms(call: Callable[[], Any], repeats: int = 40) -> float:
    times = []
    for i in range(5 + repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if i >= 5:
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def comfyui_model(checkout: Path, name: str, host: LiveHost) -> Any:
    """ComfyUI's text model with its `manual_cast` operations, holding the host's fp16 weights."""
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    sys.argv = sys.argv[:1]
    import comfy.ops
    from comfy.clip_model import CLIPTextModel
    from comfy.text_encoders.t5 import T5

    config = json.loads((checkout / "comfy" / CONFIGS[name]).read_text())
    kind = T5 if name == "t5_xxl" else CLIPTextModel
    model = kind(config, torch.float16, DEVICE, comfy.ops.manual_cast)
    wanted = {k: v for k, v in host.tensors.items() if k != PROJECTION or "text_projection" in k}
    missing, _ = model.load_state_dict(wanted, strict=False)
    assert not [m for m in missing if "text_projection" not in m], missing
    return model


def forward(model: Any, embeds: torch.Tensor, dtype: torch.dtype, state: int | None) -> Any:
    """As ComfyUI calls its text models; T5 adds up in the embeddings themselves."""
    return model(
        None, None, embeds=embeds.clone(), num_tokens=[embeds.shape[1]], intermediate_output=state,
        final_layer_norm_intermediate=False, dtype=dtype, embeds_info=[],
    )  # fmt: skip


@torch.inference_mode()
def half_graph_ms(model: Any, embeds: torch.Tensor) -> float:
    """ComfyUI's T5 in the dtype of `embeds`, which it has no way to ask for, in a CUDA graph."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            forward(model, embeds, embeds.dtype, None)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        forward(model, embeds, embeds.dtype, None)
    return median_ms(graph.replay)


def measure(checkout: Path, name: str) -> dict[str, Any]:
    spec = SPECS[name]
    # T5's many values are drawn on the GPU; CLIP's are those of every other measurement.
    drawn = {"device": DEVICE} if name == "t5_xxl" else {}
    host = LiveHost(name, spec, {n: t.to(DEVICE) for n, t in seeded_tensors(spec, **drawn)}, DEVICE)
    model = comfyui_model(checkout, name, host)
    generator = torch.Generator().manual_seed(0)
    std = 1.0 if name == "t5_xxl" else 0.02  # as large as the embeddings of such an encoder

    def prompt(tokens: int) -> torch.Tensor:
        return (torch.randn(1, tokens, spec.width, generator=generator) * std).to(DEVICE)

    def comfyui(embeds: torch.Tensor) -> Any:
        return forward(model, embeds, torch.float32, -2 if name != "t5_xxl" else None)

    found: dict[str, Any] = {}
    inputs = {tokens: prompt(tokens) for tokens in LENGTHS[name]}
    embeds = next(iter(inputs.values()))
    with AcceleratedEncoder(host) as encoder:
        encoder.prepare()
        encoder.encode(embeds)
        found["report"] = encoder.report().text()
        found["vram_bytes"] = encoder.vram_bytes
        linears = 2 * sum(out * inner for out, inner in spec.linears().values())
        found["vram_of_fp16_linears"] = encoder.vram_bytes / linears
        for tokens, x in inputs.items():
            with torch.inference_mode():
                reference = comfyui(x)[0].float()
                for _ in range(2):  # interleaved; the second pass is kept
                    theirs = median_ms(lambda x=x: comfyui(x))
                    ours = median_ms(lambda x=x: encoder.encode(x))
            cosine = torch.nn.functional.cosine_similarity(
                encoder.encode(x)[1].float(), reference, dim=-1
            )
            found[f"1x{tokens}"] = {
                "comfyui_ms": theirs,
                "octavo_ms": ours,
                "ratio": theirs / ours,
                "cosine_to_comfyui": [float(cosine.mean()), float(cosine.min())],
            }
        changing = next(n for n in spec.linears() if n.startswith(spec.block(3))) + ".weight"
        times = []
        for number in range(4):
            changed = {**host.tensors, changing: host.tensors[changing] * (1.1 + number / 10)}
            torch.cuda.synchronize()
            start = time.perf_counter()
            encoder.encode(embeds, None, Patched(number, changed.__getitem__))
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        found["lora_ms"] = times
        encoder.encode(embeds)
        encoder.rest()
        start = time.perf_counter()
        encoder.encode(embeds)
        torch.cuda.synchronize()
        found["ready_after_rest_s"] = time.perf_counter() - start
    start = time.perf_counter()
    with AcceleratedEncoder(host) as again:
        again.encode(embeds)
        torch.cuda.synchronize()
        found["ready_from_cache_s"] = time.perf_counter() - start
    if name == "t5_xxl":
        half = model.to(torch.bfloat16)  # last: the weights are not the file's any more
        for tokens, x in inputs.items():
            graph_ms = half_graph_ms(half, x.bfloat16())
            found[f"1x{tokens}"] |= {
                "bf16_graph_ms": graph_ms,
                "bf16_graph_ratio": graph_ms / found[f"1x{tokens}"]["octavo_ms"],
            }
    else:
        shapes = [(1, 77), (2, 77), (128, 77)]
        found["bench"] = bench(host, shapes, repeats=30, compiled=False).facts()
    return found


def main() -> None:
    if len(sys.argv) < 2 or not torch.cuda.is_available():
        sys.exit(
            "usage, on a machine with an NVIDIA GPU: "
            "comfyui_forward.py CHECKOUT [RESULT.json] [clip_l clip_g t5_xxl]"
        )
    checkout = Path(sys.argv[1]).resolve()
    more = sys.argv[2:]
    names = [name for name in more if name in SPECS] or ["clip_l", "clip_g"]
    result = next((Path(name) for name in more if name not in SPECS), None)
    found = {}
    for name in names:
        found[name] = measure(checkout, name)
        print(name, json.dumps(found[name], indent=1), file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
    text = json.dumps(found, indent=1)
    print(text)
    if result is not None:
        result.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
