# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""CLIP-L and CLIP-G on one GPU: ComfyUI's own forward against AcceleratedEncoder, in one process.

    python benchmarks/comfyui_forward.py CHECKOUT [RESULT.json]

CHECKOUT is a ComfyUI tree. Full size, seeded weights with outliers. Medians of wall time around
device synchronisation; also the time until new LoRA weights are served, and the memory held.
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
from octavo.seeded import CLIP_G, CLIP_L, seeded_tensors  # noqa: E402

CONFIGS = {"clip_l": "sd1_clip_config.json", "clip_g": "clip_config_bigg.json"}
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

    config = json.loads((checkout / "comfy" / CONFIGS[name]).read_text())
    model = CLIPTextModel(config, torch.float16, DEVICE, comfy.ops.manual_cast)
    wanted = {k: v for k, v in host.tensors.items() if k != PROJECTION or "text_projection" in k}
    missing, _ = model.load_state_dict(wanted, strict=False)
    assert not [m for m in missing if "text_projection" not in m], missing
    return model


def measure(checkout: Path, name: str, spec: Any) -> dict[str, Any]:
    host = LiveHost(name, spec, {n: t.to(DEVICE) for n, t in seeded_tensors(spec)}, DEVICE)
    model = comfyui_model(checkout, name, host)
    generator = torch.Generator().manual_seed(0)
    embeds = (torch.randn(1, 77, spec.width, generator=generator) * 0.02).to(DEVICE)

    def comfyui() -> Any:
        return model(
            None, None, embeds=embeds, num_tokens=[77], intermediate_output=-2,
            final_layer_norm_intermediate=False, dtype=torch.float32, embeds_info=[],
        )  # fmt: skip

    found: dict[str, Any] = {}
    with AcceleratedEncoder(host) as encoder:
        encoder.prepare()
        encoder.encode(embeds)
        found["report"] = encoder.report().text()
        found["vram_bytes"] = encoder.vram_bytes
        linears = 2 * sum(out * inner for out, inner in spec.linears().values())
        found["vram_of_fp16_linears"] = encoder.vram_bytes / linears
        with torch.inference_mode():
            reference = comfyui()[0].float()
            for _ in range(2):  # interleaved; the second pass is kept
                found["comfyui_ms"] = median_ms(comfyui)
                found["octavo_ms"] = median_ms(lambda: encoder.encode(embeds))
        found["ratio"] = found["comfyui_ms"] / found["octavo_ms"]
        got = encoder.encode(embeds)[1].float()
        cosine = torch.nn.functional.cosine_similarity(got, reference, dim=-1)
        found["cosine_to_comfyui"] = [float(cosine.mean()), float(cosine.min())]
        fc1 = spec.block(3) + "mlp.fc1.weight"
        times = []
        for number in range(4):
            changed = {**host.tensors, fc1: host.tensors[fc1] * (1.1 + number / 10)}
            torch.cuda.synchronize()
            start = time.perf_counter()
            encoder.encode(embeds, None, Patched(number, changed.__getitem__))
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        found["lora_ms"] = times
    start = time.perf_counter()
    with AcceleratedEncoder(host) as again:
        again.encode(embeds)
        torch.cuda.synchronize()
        found["ready_from_cache_s"] = time.perf_counter() - start
    found["bench"] = bench(host, [(1, 77), (2, 77), (128, 77)], repeats=30, compiled=False).facts()
    return found


def main() -> None:
    if len(sys.argv) < 2 or not torch.cuda.is_available():
        sys.exit(
            "usage, on a machine with an NVIDIA GPU: comfyui_forward.py CHECKOUT [RESULT.json]"
        )
    checkout = Path(sys.argv[1]).resolve()
    result = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    found = {
        name: measure(checkout, name, spec)
        for name, spec in (("clip_l", CLIP_L), ("clip_g", CLIP_G))
    }
    text = json.dumps(found, indent=1)
    print(text)
    if result is not None:
        result.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
