# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""accelerate(pipe) on a GPU: full-size encoders with seeded weights in tiny fp16 pipelines.

What must be reached is in the asserts; `-s` shows what was.
"""

from __future__ import annotations

import copy
import gc
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import octavo
import pytest
import torch
from octavo.engine_cache import EngineCache
from octavo.hosts import diffusers as host
from octavo.seeded import CLIP_G, CLIP_L, seeded_tensors
from torch import Tensor, nn

pytest.importorskip("diffusers")
HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1] / "hosts"), str(HERE.parents[2] / "examples")]

import tiny_pipelines as tiny  # noqa: E402 - found through the line above
from asked import (  # noqa: E402
    assert_same,
    embeddings,
    encoders,
    expected_embeddings,
    plain,
    served,
)

pytestmark = pytest.mark.gpu

# Of encode_prompt as a whole. The encoder itself is 7 times faster (CLIP-L, 3.8 -> 0.5 ms); what
# diffusers does around it (tokenizing each prompt up to three times, asking every module for hooks)
# takes 2 to 4 ms and stays.
SPEED = {"sd15": 2.5, "sdxl": 2.5}
ENCODER_SPEED = 5.0
MEMORY = {"sd15": 0.75, "sdxl": 0.6}
PROMPTS = ["a photo of an astronaut riding a horse on mars, cinematic light", "blurry, low quality"]


def full_size(spec: Any, *, projection: bool) -> Any:
    """transformers' own class of this size, fp16, with the seeded weights that have outliers."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=spec.vocabulary,
        hidden_size=spec.width,
        intermediate_size=spec.feed_forward,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        hidden_act=spec.activation,
        projection_dim=spec.width,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=1,
    )
    with torch.device("meta"):
        module = (CLIPTextModelWithProjection if projection else CLIPTextModel)(config)
    module = module.to_empty(device="cpu").half().eval()
    ours = dict(seeded_tensors(spec, projection=projection))
    ours = {name.removeprefix("text_model."): tensor for name, tensor in ours.items()}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(ours[name.removeprefix("text_model.")])
        for name, buffer in module.named_buffers():
            if name.endswith("position_ids"):
                buffer.copy_(torch.arange(spec.positions)[None])
    return module


@pytest.fixture(scope="module")
def weights() -> dict[str, nn.Module]:
    return {
        "clip_l": full_size(CLIP_L, projection=False),
        "clip_g": full_size(CLIP_G, projection=True),
    }


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> EngineCache:
    return EngineCache(tmp_path_factory.mktemp("cache"))


Make = Callable[[str], Any]


@pytest.fixture
def make(weights: dict[str, nn.Module]) -> Iterator[Make]:
    def build(name: str) -> Any:
        parts = [copy.deepcopy(weights["clip_l"])]
        if name == "sdxl":
            parts.append(copy.deepcopy(weights["clip_g"]))
        return getattr(tiny, name)(*parts).to("cuda", torch.float16)

    yield build
    gc.collect()


def held() -> int:
    """Bytes allocated now, without the process-wide workspace of cuBLAS."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def milliseconds(call: Callable[[], Any], repeats: int = 30) -> float:
    """Median of one call with the device idle before and after."""
    times = []
    for _ in range(5 + repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times[5:])[repeats // 2]


def similarity(expected: list[Tensor], got: list[Tensor]) -> tuple[float, float, float]:
    """(mean, minimum over tokens, mean over pooled vectors)."""
    tokens, pooled = [], []
    for one, other in zip(expected, got, strict=True):
        assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        cosine = torch.nn.functional.cosine_similarity(one.double(), other.double(), dim=-1)
        (pooled if one.dim() == 2 else tokens).append(cosine.flatten())
    every = torch.cat(tokens)
    return float(every.mean()), float(every.min()), float(torch.cat(pooled or tokens).mean())


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_speed_memory_and_similarity(name: str, make: Make, cache: EngineCache) -> None:
    pipe = make(name)
    last = encoders(pipe)[-1]
    ids = pipe.tokenizer(PROMPTS, padding="max_length", return_tensors="pt").input_ids.to("cuda")

    def encode_prompt() -> list[Tensor]:
        device = torch.device("cuda")
        return embeddings(pipe, PROMPTS, negative_prompt=PROMPTS[::-1], device=device)

    @torch.no_grad()
    def encode() -> None:
        last(ids[:1], output_hidden_states=True)

    before = encode_prompt()
    sixteen_bit = sum(p.nbytes for m in encoders(pipe) for p in m.parameters())
    eager_ms, encoder_eager_ms = milliseconds(encode_prompt), milliseconds(encode)
    start = held()

    octavo.accelerate(pipe, cache=cache)
    got = encode_prompt()
    for found in octavo.report(pipe).values():
        assert found.engine != "host", found.text()
    ms, encoder_ms = milliseconds(encode_prompt), milliseconds(encode)
    assert all(served(m) > 35 for m in encoders(pipe))
    ratio = (sixteen_bit + held() - start) / sixteen_bit
    mean, minimum, pooled = similarity(before, got)
    print(
        f"\n{name}: encode_prompt {eager_ms:.2f} -> {ms:.2f} ms ({eager_ms / ms:.1f}x), "
        f"its last encoder {encoder_eager_ms:.2f} -> {encoder_ms:.2f} ms "
        f"({encoder_eager_ms / encoder_ms:.1f}x), memory {ratio:.3f} of {sixteen_bit / 1e6:.0f} MB,"
        f" similarity mean {mean:.4f} min {minimum:.4f} pooled {pooled:.4f}"
    )

    octavo.restore(pipe)
    assert_same(before, encode_prompt())
    assert abs(held() - start) < 50e6
    assert mean >= 0.993 and minimum >= 0.98 and pooled >= 0.99
    assert ratio <= MEMORY[name]
    assert encoder_eager_ms / encoder_ms >= ENCODER_SPEED
    assert eager_ms / ms >= SPEED[name]


def places(module: nn.Module) -> set[str]:
    """Where everything but the token table is."""
    return {p.device.type for n, p in module.named_parameters() if "token_embedding" not in n}


def test_original_weights_wait_in_host_memory(make: Make, cache: EngineCache) -> None:
    pipe = make("sd15")
    module = pipe.text_encoder
    weights = {n: t.clone() for n, t in module.state_dict().items()}
    before = embeddings(pipe)
    octavo.accelerate(pipe, cache=cache)
    got = embeddings(pipe)
    assert places(module) == {"cpu"} and module.device.type == "cuda"
    assert all(torch.equal(weights[n], t.to("cuda")) for n, t in module.state_dict().items())

    assert_same(before, expected_embeddings(pipe))  # PyTorch fetches them
    assert places(module) == {"cuda"}
    assert_same(got, embeddings(pipe))
    assert places(module) == {"cpu"}
    twin = copy.deepcopy(pipe)
    assert_same(before, embeddings(twin))
    assert places(module) == {"cpu"}

    with torch.no_grad():  # in place, while they wait
        name = next(n for n in weights if ".layers.0.mlp.fc1.weight" in n)
        waiting = module.get_parameter(name)
        waiting.data.mul_(1.5)
        changed = embeddings(pipe)
        assert not torch.equal(changed[0], got[0])
        assert similarity(expected_embeddings(pipe), changed)[0] > 0.99
        waiting.data.copy_(weights[name])
    assert_same(got, embeddings(pipe))

    pipe.to("cpu")
    small = held()
    pipe.to(torch.float32)
    embeddings(pipe)  # on the CPU there is only PyTorch, and the engine's memory is free
    assert held() < small - 50e6
    pipe.to("cuda", torch.float16)
    assert similarity(before, embeddings(pipe))[0] > 0.99
    assert octavo.report(pipe)["text_encoder"].engine != "host"
    octavo.restore(pipe)
    assert places(module) == {"cuda"}
    assert all(torch.equal(weights[n], t) for n, t in module.state_dict().items())


def test_lora(make: Make, cache: EngineCache) -> None:
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    pipe = octavo.accelerate(make("sd15"), cache=cache)
    module = pipe.text_encoder
    base = embeddings(pipe)
    torch.manual_seed(0)
    config = LoraConfig(
        r=8, lora_alpha=1, target_modules=["q_proj", "v_proj", "fc1"], init_lora_weights=False
    )
    originals = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear)}
    inject_adapter_in_model(config, module, "a")
    start = time.perf_counter()
    got = embeddings(pipe)
    torch.cuda.synchronize()
    print(f"\nfirst prompt with a LoRA: {(time.perf_counter() - start) * 1e3:.0f} ms")
    assert places(module) == {"cuda"}  # PEFT fuses where the weights are
    mean, minimum, _ = similarity(expected_embeddings(pipe), got)
    print(f"with a LoRA: mean {mean:.4f} min {minimum:.4f}")
    assert mean > 0.99 and host._served(module).reasons.total() == 0
    assert similarity(base, got)[0] < mean - 0.001
    for layer in [m for m in module.modules() if isinstance(m, BaseTunerLayer)]:
        layer.merge()
    assert similarity(expected_embeddings(pipe), embeddings(pipe))[0] > 0.99
    for layer in [m for m in module.modules() if isinstance(m, BaseTunerLayer)]:
        layer.unmerge()
    for name, linear in originals.items():
        if isinstance(module.get_submodule(name), BaseTunerLayer):
            parent, _, key = name.rpartition(".")
            setattr(module.get_submodule(parent), key, linear)
    assert similarity(base, embeddings(pipe))[0] > 0.99
    octavo.restore(pipe)


@pytest.mark.parametrize("kind", ["model", "sequential", "group"])
def test_offload(kind: str, make: Make, cache: EngineCache) -> None:
    from diffusers.hooks import apply_group_offloading

    pipe = make("sd15")
    before = embeddings(pipe)
    weights = {n: t.cpu() for n, t in pipe.text_encoder.state_dict().items()}
    octavo.accelerate(pipe, cache=cache)
    embeddings(pipe)  # parked
    pipe.to("cpu")
    if kind == "group":
        for module in encoders(pipe):
            apply_group_offloading(
                module, torch.device("cuda"), torch.device("cpu"), offload_type="leaf_level"
            )
        for part in (pipe.unet, pipe.vae):
            part.to("cuda")
    else:
        getattr(pipe, f"enable_{kind}_cpu_offload")()
    for _ in range(2):
        reached = [served(m) for m in encoders(pipe)]
        tiny.picture(pipe)
        assert all(served(m) > n for m, n in zip(encoders(pipe), reached, strict=True))
        assert similarity(before, embeddings(pipe))[0] > 0.99
    assert similarity(before, expected_embeddings(pipe))[1] > 0.999
    assert all(host._served(m).reasons.total() == 0 for m in encoders(pipe))
    octavo.restore(pipe)
    if kind != "group":
        pipe.remove_all_hooks()
        assert all(
            torch.equal(weights[n], t.cpu()) for n, t in pipe.text_encoder.state_dict().items()
        )


def test_memory_comes_back(make: Make, cache: EngineCache) -> None:
    start = held()
    for _ in range(3):
        pipe = octavo.accelerate(make("sd15"), cache=cache)
        embeddings(pipe)
        with plain(pipe.text_encoder):
            embeddings(pipe)
        del pipe
        assert abs(held() - start) < 50e6
