# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""One real ComfyUI process on a GPU: times, similarity, LoRA switches and memory, as JSON.

    python tests/gpu/comfyui_run.py CHECKOUT [sd1 sdxl flux flux_fp8 sd3] [ComfyUI's own options]

Of its options --disable-dynamic-vram and --gpu-only matter here. Dynamic VRAM is set up as
ComfyUI's main.py does it. Weights are seeded, full size.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if len(sys.argv) < 2 or not Path(sys.argv[1], "comfy").is_dir():
    sys.exit("usage: python comfyui_run.py CHECKOUT [families] [ComfyUI's own options]")
CHECKOUT = Path(sys.argv.pop(1)).resolve()
FAMILIES = ("sd1", "sdxl", "flux", "flux_fp8", "sd3")
ASKED = [name for name in FAMILIES if name in sys.argv] or FAMILIES
sys.argv = [word for word in sys.argv if word not in FAMILIES]
sys.path.insert(0, str(CHECKOUT))

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()
import comfy_aimdo.control  # noqa: E402
from comfy.cli_args import args, enables_dynamic_vram  # noqa: E402

if enables_dynamic_vram():
    try:
        comfy_aimdo.control.init(
            simple_vram_headroom=False, nvml_pressure=not args.disable_nvml_pressure
        )
    except TypeError:
        comfy_aimdo.control.init()

import comfy.memory_management  # noqa: E402
import comfy.model_management as management  # noqa: E402
import comfy.model_patcher  # noqa: E402

DYNAMIC = False
if enables_dynamic_vram():
    devices = management.get_all_torch_devices()
    try:
        DYNAMIC = comfy_aimdo.control.init_devices((d.index, 0) for d in devices)
    except TypeError:
        DYNAMIC = comfy_aimdo.control.init_devices(d.index for d in devices)
    if DYNAMIC:
        comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
        comfy.memory_management.aimdo_enabled = True

import comfy.lora  # noqa: E402
import comfy.sd  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from octavo.accelerated import _as_tensors  # noqa: E402
from octavo.backends.fp8_ops import quantize_weight  # noqa: E402
from octavo.hosts import comfy as host  # noqa: E402
from octavo.hosts.comfy_source import relevant_patches  # noqa: E402
from octavo.requantize import widened  # noqa: E402
from octavo.seeded import CLIP_G, CLIP_L, T5_XXL, seeded_tensors  # noqa: E402

TEXT = "a photo of a (lighthouse:1.2) on a cliff in a storm, detailed oil painting"


def median_ms(call: Callable[[], Any], repeats: int = 20, warm_up: int = 3) -> float:
    times = []
    for i in range(warm_up + repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if i >= warm_up:
            times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)[repeats // 2]


def once_ms(call: Callable[[], Any]) -> tuple[float, Any]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3, result


def encode(clip: Any, text: str = TEXT) -> Any:
    """What CLIPTextEncode does."""
    return clip.encode_from_tokens_scheduled(clip.tokenize(text))[0]


def alike(a: Any, b: Any) -> dict[str, float]:
    x, y = (t[0].double().cpu().flatten(0, -2) for t in (a, b))
    tokens = F.cosine_similarity(x, y, dim=-1)
    pooled = (t[1]["pooled_output"].double().cpu() for t in (a, b))
    return {
        "token_mean": float(tokens.mean()),
        "token_min": float(tokens.min()),
        "pooled": float(F.cosine_similarity(*pooled, dim=-1)),
    }


def lora(state: dict[str, torch.Tensor], seed: int, rank: int = 32) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    found = {}
    for key, weight in state.items():
        inside = ".encoder.layers." in key or ".encoder.block." in key
        if not inside or "relative" in key or not key.endswith("weight") or weight.dim() != 2:
            continue
        name = f"text_encoders.{key.removesuffix('.weight')}"
        out, inner = weight.shape
        up = torch.randn(out, rank, generator=random) * rank**-0.5
        down = torch.randn(rank, inner, generator=random) * inner**-0.5 * 0.15
        found |= {f"{name}.lora_up.weight": up.half(), f"{name}.lora_down.weight": down.half()}
        found[f"{name}.alpha"] = torch.tensor(float(rank))
    return found


def same_sets(service: Any, clip: Any) -> bool:
    """Whether the sets kept for `clip` are bit for bit what one weight after the other gives."""
    for served in service.served.values():
        source, encoder = served.source, served.accelerated
        patches, base = relevant_patches(source, clip.patcher), encoder._serving.weights

        def read(name: str, source: Any = source, patches: Any = patches) -> Any:
            weight = source.read(name)
            if name not in patches:
                return weight
            wide = weight.to(device=source.device, dtype=torch.float32, copy=True)
            wide = comfy.lora.calculate_weight(patches[name], wide, source.prefix + name)
            return wide.to(weight.dtype)

        with torch.inference_mode(False), torch.no_grad():
            names = [n for n in source.shapes if n != source.spec.token_table]
            fresh = base.requantized({n: read(n).to(source.device) for n in names})
            amax = encoder.expect(read)[2]
            expected = _as_tensors(widened(fresh, amax, source.device))
            kept = _as_tensors(encoder._sets[served.patched(clip.patcher).identity])
            for name, want in expected.items():
                a, b = (t.cpu().reshape(-1).view(torch.uint8) for t in (want, kept[name]))
                if not torch.equal(a, b):
                    print(f"{served.name}: {name} differs")
                    return False
    return True


def used_mb() -> float:
    """Of the GPU, by all that there is."""
    management.soft_empty_cache()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e6


def held_mb() -> float:
    """By tensors of PyTorch alone: small ones that are kept can keep a whole segment from others.

    Dynamic VRAM is not among them.
    """
    gc.collect()
    return torch.cuda.memory_allocated() / 1e6


def without_t5(name: str) -> Any:
    specs = (CLIP_L, CLIP_G) if name == "sdxl" else (CLIP_L,)
    return comfy.sd.load_text_encoder_state_dicts([dict(seeded_tensors(spec)) for spec in specs])


def measure(name: str, plain: Any) -> dict[str, Any]:
    management.unload_all_models()  # ComfyUI may have loaded it already
    found: dict[str, Any] = {"before_mb": used_mb(), "before_held_mb": held_mb()}
    expected = encode(plain)
    found["pytorch_ms"] = median_ms(lambda: encode(plain))
    found["pytorch_mb"] = used_mb() - found["before_mb"]
    management.unload_all_models()
    ours, _ = host.accelerate(plain, host.Settings())
    found["first_s"], got = once_ms(lambda: encode(ours))
    found["first_s"] /= 1e3
    encode(ours, "a second prompt")
    found["octavo_ms"] = median_ms(lambda: encode(ours))
    found["ratio"] = found["pytorch_ms"] / found["octavo_ms"]
    found["similarity"] = alike(expected, got)
    found["octavo_mb"] = used_mb() - found["before_mb"]
    service = host.service_of(ours)
    assert service is not None
    found["lines"] = service.lines()
    found["loaded_pytorch_mb"] = ours.patcher.loaded_size() / 1e6
    found["engines_mb"] = service.vram_bytes / 1e6
    found["weights_mb"] = plain.patcher.model_size() / 1e6
    found["encode_only_ms"] = _engines_ms(service)

    state = plain.cond_stage_model.state_dict()
    files = {seed: lora(state, seed) for seed in (1, 2)}
    del state  # it keeps the embeddings on the GPU

    def with_lora(clip: Any, seed: int) -> Any:
        return comfy.sd.load_lora_for_models(None, clip, files[seed], 0.0, 1.0)[1]

    switches, results, peaks = {}, {}, {}
    for step, seed in (("a", 1), ("b", 2), ("a again", 1), ("none", None), ("a kept", 1)):
        clip = ours if seed is None else with_lora(ours, seed)  # a new clone, as a node makes it
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        switches[step], results[step] = once_ms(lambda clip=clip: encode(clip))
        peaks[step] = (torch.cuda.max_memory_allocated() - held) / 1e6
    found["lora_ms"], found["lora_peak_mb"] = switches, peaks
    found["lora_same"] = torch.equal(results["a"][0], results["a again"][0])
    found["lora_exact"] = same_sets(service, with_lora(ours, 1))
    found["none_same"] = torch.equal(results["none"][0], got[0])
    patched = encode(with_lora(plain, 1))
    management.unload_all_models()  # else PyTorch's own copies would count as ours
    encode(with_lora(ours, 1))
    found["lora_similarity"] = alike(patched, results["a"])
    found["lora_effect"] = alike(expected, patched)["token_mean"]
    found["why_host"] = {n: s.why_host for n, s in service.served.items()}

    work = torch.randn(4096, 4096, device=ours.patcher.load_device)
    prompts = [f"number {100 + i} " * (i % 3 * 30 + 1) for i in range(200)]
    for text in prompts[:20]:  # every batch size once: 1, 2 and 4 chunks of 75 tokens
        encode(ours, text)
    start = used_mb()
    first = encode(ours, "kept")[0].clone()
    for text in prompts:
        work @ work
        encode(ours, text)
    found["growth_mb"] = used_mb() - start
    found["graphs"] = {
        name: sorted(map(str, served.accelerated._serving.engine._captured))
        for name, served in service.served.items()
    }
    found["stable"] = torch.equal(first, encode(ours, "kept")[0])
    del work
    found["held_mb"] = {n: s.accelerated.vram_bytes / 1e6 for n, s in service.served.items()}
    before = used_mb()
    management.unload_all_models()
    found["freed_mb"] = before - used_mb()
    found["after_mb"] = used_mb() - found["before_mb"]
    found["after_held_mb"] = held_mb() - found["before_held_mb"]
    found["same_after_unload"] = torch.equal(encode(ours)[0], got[0])
    management.unload_all_models()
    found["reload_ms"] = once_ms(lambda: encode(ours))[0]
    management.unload_all_models()
    return found


def _engines_ms(service: Any) -> dict[str, float]:
    found = {}
    for name, served in service.served.items():
        spec = served.source.spec
        x = torch.zeros(2, spec.positions, spec.width, device=service.device)
        with torch.inference_mode(False), torch.no_grad():
            served.accelerated.attempt(x)
            found[name] = median_ms(lambda served=served, x=x: served.accelerated.attempt(x))
    return found


def with_t5(kind: str, fp8: bool) -> Any:
    """FLUX's CLIP-L and T5-XXL, for SD3 also CLIP-G; `fp8`: T5 with scales, as a scaled file."""
    linears = {name + ".weight" for name in T5_XXL.linears()}
    note = torch.frombuffer(bytearray(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8)
    t5: dict[str, torch.Tensor] = {}
    for name, tensor in seeded_tensors(T5_XXL, device="cuda"):
        if fp8 and name in linears:
            codes, scale = quantize_weight(tensor)
            t5[name], t5[name + "_scale"] = codes.cpu(), scale.cpu()
            t5[name.removesuffix("weight") + "comfy_quant"] = note.clone()
        else:
            t5[name] = tensor.cpu()
    clips = [CLIP_L, CLIP_G] if kind == "SD3" else [CLIP_L]
    return comfy.sd.load_text_encoder_state_dicts(
        [*(dict(seeded_tensors(spec)) for spec in clips), t5],
        clip_type=comfy.sd.CLIPType[kind],
    )


def own_codes(service: Any) -> bool:
    """Whether the engine's codes and scales are those that ComfyUI's module holds."""
    served = service.served["t5xxl"]
    weights = served.accelerated._serving.weights
    for name, linear in served.source.quantized.items():
        held = weights.linears[name]
        a, b = (t.cpu().view(torch.uint8) for t in (held.weight, linear.codes()))
        if not torch.equal(a, b) or float(held.weight_scale) != float(linear.weight_scale):
            print(f"{name} differs")
            return False
    return True


def measure_with_t5(plain: Any, fp8: bool) -> dict[str, Any]:
    """Whole CLIPTextEncode: FLUX has 256 tokens of T5-XXL and 77 of CLIP-L, SD3 77 of all three."""
    device = plain.patcher.load_device
    management.unload_all_models()  # ComfyUI may have loaded it already
    found: dict[str, Any] = {"before_mb": used_mb(), "before_held_mb": held_mb()}
    expected = encode(plain)
    found["pytorch_ms"] = median_ms(lambda: encode(plain), 10)
    found["pytorch_mb"] = used_mb() - found["before_mb"]
    management.unload_all_models()
    found["pytorch_after_mb"] = used_mb() - found["before_mb"]
    ours, _ = host.accelerate(plain, host.Settings())
    found["first_s"], got = once_ms(lambda: encode(ours))
    found["first_s"] /= 1e3
    encode(ours, "a second prompt")
    found["octavo_ms"] = median_ms(lambda: encode(ours))
    found["ratio"] = found["pytorch_ms"] / found["octavo_ms"]
    found["similarity"] = alike(expected, got)
    found["octavo_mb"] = used_mb() - found["before_mb"]
    service = host.service_of(ours)
    assert service is not None
    found["lines"] = service.lines()
    found["held_mb"] = {n: s.accelerated.vram_bytes / 1e6 for n, s in service.served.items()}
    found["loaded_pytorch_mb"] = ours.patcher.loaded_size() / 1e6
    found["own_codes"] = own_codes(service) if fp8 else None

    # Between prompts the diffusion model takes the memory; then the next prompt comes.
    found["cycles"] = []
    for _ in range(3):
        management.free_memory(1e30, device)
        management.soft_empty_cache()
        cycle = {"given_back_mb": used_mb() - found["before_mb"]}
        cycle["engines_mb"] = service.vram_bytes / 1e6
        cycle["ready_ms"], again = once_ms(lambda: encode(ours))
        cycle["same"] = torch.equal(again[0], got[0])
        found["cycles"].append(cycle)

    state = plain.cond_stage_model.state_dict()
    files = {seed: lora(state, seed) for seed in (1, 2)}
    del state  # it keeps the embeddings on the GPU

    def with_lora(clip: Any, seed: int) -> Any:
        return comfy.sd.load_lora_for_models(None, clip, files[seed], 0.0, 1.0)[1]

    switches, results = {}, {}
    for step, seed in (("a", 1), ("b", 2), ("a again", 1), ("none", None)):
        clip = ours if seed is None else with_lora(ours, seed)
        switches[step], results[step] = once_ms(lambda clip=clip: encode(clip))
    found["lora_ms"] = switches
    found["lora_same"] = torch.equal(results["a"][0], results["a again"][0])
    found["none_same"] = torch.equal(results["none"][0], got[0])
    found["why_host"] = {n: s.why_host for n, s in service.served.items()}
    management.unload_all_models()
    patched = encode(with_lora(plain, 1))
    found["lora_similarity"] = alike(patched, results["a"])
    found["lora_effect"] = alike(expected, patched)["token_mean"]
    management.unload_all_models()

    # SD3's T5 takes prompts as long as they are, so those of 60 texts differ: all of them twice.
    prompts = [f"number {100 + i} " * (i % 3 * 60 + 1) for i in range(60)]
    for text in prompts:
        encode(ours, text)
    start = used_mb()
    for text in prompts:
        encode(ours, text)
    found["growth_mb"] = used_mb() - start
    management.unload_all_models()
    found["after_mb"] = used_mb() - found["before_mb"]
    found["after_held_mb"] = held_mb() - found["before_held_mb"]
    return found


def main() -> None:
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "dynamic": bool(DYNAMIC),
        "options": sys.argv[1:],
    }

    def keep(name: str, found: dict[str, Any]) -> None:
        result[name] = found
        print(name, json.dumps(found), file=sys.stderr, flush=True)

    with torch.inference_mode():
        for name in ASKED:
            if name in ("sd1", "sdxl"):
                keep(name, measure(name, without_t5(name)))
            else:
                fp8 = name == "flux_fp8"
                keep(name, measure_with_t5(with_t5("SD3" if name == "sd3" else "FLUX", fp8), fp8))
            gc.collect()
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
