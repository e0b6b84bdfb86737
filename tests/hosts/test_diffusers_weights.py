# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""accelerate(pipe): weights that change (LoRA, in place), move, are copied, shared and freed."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate as hf_accelerate
import diffusers
import octavo
import pytest
import tiny_pipelines as tiny
import torch
from asked import (
    assert_close,
    assert_same,
    core_of,
    differs,
    embeddings,
    encoders,
    expected_embeddings,
    parkable,
    plain,
    reorder,
    served,
)
from octavo.backends.torch_fp8 import TorchFp8Engine
from octavo.hosts import diffusers as host
from octavo.hosts import parking
from octavo.hosts.families import tower_of
from octavo.hosts.tower import Tower
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from torch import Tensor, nn

Accelerate = Callable[..., Any]
IDS = torch.tensor([[49406, 320, 1125, 539, 320, 2368, *[49407] * 71]])
LINEARS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.out_proj", "mlp.fc1", "mlp.fc2")


@torch.no_grad()
def states(module: nn.Module) -> list[Tensor]:
    out = module(IDS, output_hidden_states=True)
    return [*out.hidden_states, out.last_hidden_state]


def eager(module: nn.Module) -> list[Tensor]:
    with plain(module):
        return states(module)


def bits(pipe: Any) -> dict[str, Tensor]:
    """Copies of every weight and buffer of the text encoders."""
    found = enumerate(encoders(pipe))
    return {f"{i}.{n}": t.clone() for i, m in found for n, t in m.state_dict().items()}


def assert_bits(expected: dict[str, Tensor], got: dict[str, Tensor]) -> None:
    assert list(expected) == list(got)
    assert all(torch.equal(expected[n], got[n]) for n in expected)


# LoRA


def lora(pipe: Any, seed: int, *, kohya: bool = False, alpha: float = 4.0) -> dict[str, Tensor]:
    """A LoRA file for the text encoders, as diffusers or as kohya's trainer writes it."""
    random = torch.Generator().manual_seed(seed)
    file: dict[str, Tensor] = {}
    for n, module in enumerate(encoders(pipe)):
        core = core_of(module)
        for i in range(len(core.encoder.layers)):
            for leaf in LINEARS:
                out, inner = core.get_submodule(f"encoder.layers.{i}.{leaf}").weight.shape
                down = torch.randn(4, inner, generator=random) * inner**-0.5
                up = torch.randn(out, 4, generator=random) * 0.2
                path = f"text_model.encoder.layers.{i}.{leaf}"
                if kohya:
                    te = "lora_te" if len(encoders(pipe)) == 1 else f"lora_te{n + 1}"
                    name = f"{te}_{path.replace('.', '_')}"
                    file |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
                    file[f"{name}.alpha"] = torch.tensor(alpha)
                else:
                    name = f"text_encoder{'' if n == 0 else '_2'}.{path}"
                    file |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    unet = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    if not kohya:
        file[f"{unet}.lora_A.weight"] = torch.zeros(4, 64)
        file[f"{unet}.lora_B.weight"] = torch.zeros(64, 4)
    return file


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
@pytest.mark.parametrize("kohya", [False, True], ids=["diffusers", "kohya"])
def test_lora(name: str, kohya: bool, accelerate: Accelerate) -> None:
    """Load, scale, several, weights, disable, fuse, unfuse, delete, unload: always the adapted
    encoder's results, at once; afterwards the very engine that was there before."""
    pipe = accelerate(tiny.PIPELINES[name]())
    base = embeddings(pipe)
    engines = [host._served(m)._encoder for m in encoders(pipe)]

    def check(*, same_as: list[Tensor] | None = None) -> list[Tensor]:
        before = [served(m) for m in encoders(pipe)]
        got = embeddings(pipe)
        assert all(served(m) > n for m, n in zip(encoders(pipe), before, strict=True))
        assert_close(expected_embeddings(pipe), got)
        assert differs(base, got) is (same_as is not base)
        if same_as is not None:
            assert_same(same_as, got)
        return got

    pipe.load_lora_weights(lora(pipe, 1, kohya=kohya), adapter_name="a")
    only_a = check()
    pipe.load_lora_weights(lora(pipe, 2, kohya=kohya), adapter_name="b")
    pipe.set_adapters(["b"])
    only_b = check()
    assert differs(only_a, only_b)
    pipe.set_adapters(["a", "b"], [0.5, 0.25])
    both = check()
    pipe.set_adapters(["a"])
    check(same_as=only_a)
    pipe.disable_lora()
    check(same_as=base)
    pipe.enable_lora()
    check(same_as=only_a)
    pipe.set_adapters(["a", "b"], [0.5, 0.25])
    check(same_as=both)
    pipe.set_adapters(["a", "b"], [0.0, 0.0])
    check(same_as=base)
    pipe.set_adapters(["a", "b"], [1.0, 1.0])
    pipe.delete_adapters("b")
    check(same_as=only_a)
    pipe.unload_lora_weights()
    check(same_as=base)
    assert [host._served(m)._encoder for m in encoders(pipe)] == engines
    assert all(m._encoder._ready_s for m in map(host._served, encoders(pipe)))


def test_lora_scale_of_one_call(accelerate: Accelerate) -> None:
    """`cross_attention_kwargs` scales adapters only while prompts are encoded."""
    pipe = accelerate(tiny.sd15())
    base = embeddings(pipe)
    pipe.load_lora_weights(lora(pipe, 1))
    full = embeddings(pipe)
    third = embeddings(pipe, lora_scale=0.3)
    with plain(*encoders(pipe)):
        assert_close(embeddings(pipe, lora_scale=0.3), third)
    assert differs(full, third) and differs(base, third)
    assert_same(full, embeddings(pipe))


def test_fused_lora(accelerate: Accelerate) -> None:
    """Fusing writes through `.data`: no counter tells, and unfusing is not exact."""
    pipe = accelerate(tiny.sd15())
    base = embeddings(pipe)
    weights = bits(pipe)
    for scale in (1.0, 0.5):
        pipe.load_lora_weights(lora(pipe, 1))
        pipe.set_adapters(["default_0"], [1.0])
        unfused = embeddings(pipe)
        pipe.fuse_lora(lora_scale=scale)
        fused = embeddings(pipe)
        assert_close(expected_embeddings(pipe), fused)
        assert differs(fused, unfused) is (scale != 1.0)
        pipe.unload_lora_weights()  # the weights keep it
        assert_close(expected_embeddings(pipe), embeddings(pipe))
        assert differs(base, embeddings(pipe))
        for (name, tensor), old in zip(
            encoders(pipe)[0].state_dict().items(), weights.values(), strict=True
        ):
            assert tensor.shape == old.shape, name
            tensor.copy_(old)
        assert_same(base, embeddings(pipe))

    pipe.load_lora_weights(lora(pipe, 1))
    pipe.fuse_lora()
    pipe.disable_lora()  # the first request unfuses, in PEFT's own forward
    assert_close(expected_embeddings(pipe), embeddings(pipe))
    pipe.enable_lora()
    pipe.unfuse_lora()
    assert_close(expected_embeddings(pipe), embeddings(pipe))


def test_accelerate_with_a_lora_in_place(accelerate: Accelerate) -> None:
    pipe = tiny.sdxl()
    base = embeddings(pipe)
    pipe.load_lora_weights(lora(pipe, 1))
    adapted = embeddings(pipe)
    accelerate(pipe)
    assert_close(adapted, embeddings(pipe))
    assert all(served(m) for m in encoders(pipe))
    pipe.unload_lora_weights()
    assert_close(base, embeddings(pipe))
    octavo.restore(pipe)
    assert_same(base, embeddings(pipe))


def test_effective_weights_are_peft_merges(accelerate: Accelerate) -> None:
    pipe = tiny.sd15()
    pipe.load_lora_weights(lora(pipe, 1, kohya=True, alpha=1.0), adapter_name="a")
    pipe.load_lora_weights(lora(pipe, 2), adapter_name="b")
    pipe.set_adapters(["a", "b"], [0.7, -0.4])
    tower = tower_of(pipe.text_encoder)
    assert isinstance(tower, Tower) and len(tower.adapters) == 3 * len(LINEARS)
    got = {name: tower.effective(f"{name}.weight").clone() for name in tower.adapters}
    for name, adapter in tower.adapters.items():
        adapter.merge(safe_merge=True)
        torch.testing.assert_close(got[name], adapter.get_base_layer().weight.detach())


@pytest.mark.parametrize("inplace", ["data", "version", "order"])
def test_lora_changed_in_place(inplace: str, accelerate: Accelerate) -> None:
    pipe = accelerate(tiny.sd15())
    pipe.load_lora_weights(lora(pipe, 1))
    before = embeddings(pipe)
    with torch.no_grad():
        for name, p in pipe.text_encoder.named_parameters():
            if "lora_B" in name and inplace == "order":
                reorder(p)
            elif "lora_B" in name:
                (p.data if inplace == "data" else p).mul_(-1)
    got = embeddings(pipe)
    assert differs(before, got)
    assert_close(expected_embeddings(pipe), got)


@pytest.mark.parametrize(
    "options", [{"use_dora": True}, {"lora_bias": True}, {"lora_dropout": 0.5}]
)
def test_adapters_that_are_not_understood(options: dict[str, Any], accelerate: Accelerate) -> None:
    module = accelerate(tiny.clip_text(32))
    base = states(module)
    reached = served(module)
    config = LoraConfig(r=4, target_modules=["q_proj", "fc1"], init_lora_weights=False, **options)
    inject_adapter_in_model(config, module, "odd")
    if "lora_dropout" in options:
        module.train()
        for part in module.children():
            part.train()
        module.training = False
        with plain(module):
            torch.manual_seed(1)
            expected = states(module)
        torch.manual_seed(1)
        assert_same(expected, states(module))
    else:
        assert_same(eager(module), states(module))
    assert served(module) == reached
    assert "adapter 'odd'" in octavo.report(module)["CLIPTextModel"].text()
    for part in module.modules():
        if isinstance(part, BaseTunerLayer):
            part.enable_adapters(False)
    assert_same(base, states(module))
    assert served(module) == reached + 1


def test_many_loras(accelerate: Accelerate) -> None:
    """More than the engine keeps; each comes back right."""
    pipe = accelerate(tiny.sd15())
    files = [lora(pipe, seed) for seed in range(6)]
    answers = []
    for _ in range(2):
        for file in files:
            pipe.load_lora_weights(dict(file))
            answers.append(embeddings(pipe))
            pipe.unload_lora_weights()
    for first, second in zip(answers[:6], answers[6:], strict=True):
        assert_same(first, second)
    assert all(differs(answers[0], other) for other in answers[1:6])


# Weights that change in place


def scaled(module: Any) -> None:
    with torch.no_grad():
        core_of(module).encoder.layers[0].mlp.fc1.weight.mul_(1.5)


def one_row(module: Any) -> None:
    with torch.no_grad():
        core_of(module).encoder.layers[0].mlp.fc1.weight[7] += 1


def other_order(module: Any) -> None:
    for layer in core_of(module).encoder.layers:
        reorder(layer.mlp.fc2.weight)
        reorder(layer.self_attn.v_proj.weight)


def data_copy(module: Any) -> None:
    weight = core_of(module).encoder.layers[1].self_attn.v_proj.weight
    weight.data.copy_(weight.data * -1)


def data_replaced(module: Any) -> None:
    bias = core_of(module).encoder.layers[1].mlp.fc2.bias
    bias.data = bias.data + 1


def new_parameter(module: Any) -> None:
    norm = core_of(module).final_layer_norm
    norm.weight = nn.Parameter(norm.weight.detach() * 2)


def positions(module: Any) -> None:
    core_of(module).embeddings.position_embedding.weight.data.mul_(3)


def state_dict(module: Any) -> None:
    torch.manual_seed(5)
    module.load_state_dict(tiny.clip_text(32).state_dict())


def tokens(module: Any) -> None:
    module.get_input_embeddings().weight.data.mul_(-2)


@pytest.mark.parametrize(
    "change",
    [
        scaled,
        one_row,
        other_order,
        data_copy,
        data_replaced,
        new_parameter,
        positions,
        state_dict,
        tokens,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changed_in_place(
    change: Callable[[Any], None], dtype: torch.dtype, accelerate: Accelerate
) -> None:
    torch.manual_seed(0)
    module = accelerate(tiny.clip_text(32).to(dtype))
    before = states(module)
    saved = copy.deepcopy(module.state_dict())
    change(module)
    got = states(module)
    assert_close(eager(module), got, 0.98, 0.93)
    assert any(float((a - b).abs().max()) > 0.05 for a, b in zip(before, got, strict=True))
    module.load_state_dict(saved)
    assert_same(before, states(module))
    assert served(module) == 3


def test_layers_taken_away(accelerate: Accelerate) -> None:
    """The old way to skip layers: another architecture, so another engine."""
    module = accelerate(tiny.clip_text(32))
    assert len(states(module)) == 5
    core = core_of(module)
    core.encoder.layers = core.encoder.layers[:-1]
    got = states(module)
    assert len(got) == 4
    assert_close(eager(module), got)
    del core.encoder.layers[-1]
    assert_close(eager(module), states(module))
    assert served(module) == 3


def test_an_engine_that_fails_while_other_weights_are_in_place(
    accelerate: Accelerate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine made anew must not take these for the base."""
    from octavo import accelerated
    from octavo.errors import EngineUnavailable

    monkeypatch.setattr(accelerated, "_failed", {})
    module = accelerate(tiny.clip_text(32))
    before = states(module)
    saved = copy.deepcopy(module.state_dict())
    scaled(module)
    with monkeypatch.context() as broken:

        def fail(*_: Any) -> None:
            raise EngineUnavailable("torch_fp8", "it broke", "nothing helps")

        broken.setattr(TorchFp8Engine, "encode", fail)
        assert_same(eager(module), states(module))
    assert_close(eager(module), states(module))
    module.load_state_dict(saved)
    assert_close(before, states(module))
    assert_close(eager(module), states(module))


# Textual inversion


def test_textual_inversion(accelerate: Accelerate) -> None:
    """Before and after; the table grows, and the new tokens are looked up in the model."""
    generator = torch.Generator().manual_seed(3)
    vectors = [torch.randn(2, 32, generator=generator), torch.randn(1, 32, generator=generator)]
    pipe = tiny.sd15()
    pipe.load_textual_inversion(vectors[0], token="<one>")
    accelerate(pipe)
    key = octavo.report(pipe)["text_encoder"].checkpoint
    first = embeddings(pipe, "a <one> cat")
    assert_close(expected_embeddings(pipe, "a <one> cat"), first)
    pipe.load_textual_inversion(vectors[1], token="<two>")
    assert_close(
        expected_embeddings(pipe, "a <one> <two> cat"), embeddings(pipe, "a <one> <two> cat")
    )
    assert_same(first, embeddings(pipe, "a <one> cat"))
    assert differs(first, embeddings(pipe, "a cat"))
    pipe.unload_textual_inversion("<two>")
    assert_close(expected_embeddings(pipe, "a <one> cat"), embeddings(pipe, "a <one> cat"))
    pipe.unload_textual_inversion()
    assert_close(expected_embeddings(pipe, "a cat"), embeddings(pipe, "a cat"))
    assert key is None or octavo.report(pipe)["text_encoder"].checkpoint == key
    assert host._served(pipe.text_encoder).reasons.total() == 0


def test_added_tokens_leave_the_checkpoint_alone(accelerate: Accelerate) -> None:
    torch.manual_seed(0)
    module = accelerate(tiny.clip_text(32))
    states(module)
    key = octavo.report(module)["CLIPTextModel"].checkpoint
    other = copy.deepcopy(module)
    other.resize_token_embeddings(49416)
    accelerate(other)
    states(other)
    assert octavo.report(other)["CLIPTextModel"].checkpoint == key is not None


# Offloading


def model_offload(pipe: Any) -> None:
    """`enable_model_cpu_offload`; diffusers calls it again itself and must find a device then."""
    kind = type(pipe)
    pipe.enable_model_cpu_offload = lambda **_: kind.enable_model_cpu_offload(pipe, device="cpu")
    pipe.enable_model_cpu_offload()


def sequential_offload(pipe: Any) -> None:
    """What `enable_sequential_cpu_offload` does with a GPU."""

    def enable() -> None:
        for part in pipe.components.values():
            if isinstance(part, nn.Module):
                hf_accelerate.cpu_offload(part, torch.device("cpu"))

    pipe.enable_sequential_cpu_offload = enable
    enable()


def without_hooks(pipe: Any) -> None:
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            hf_accelerate.hooks.remove_hook_from_module(part, recurse=True)
    pipe._all_hooks = []


def group_offload(kind: str) -> Callable[[Any], None]:
    def apply(pipe: Any) -> None:
        for module in encoders(pipe):
            diffusers.hooks.apply_group_offloading(
                module,
                onload_device=torch.device("cpu"),
                offload_device=torch.device("cpu"),
                offload_type=kind,
                num_blocks_per_group=1 if kind == "block_level" else None,
            )

    return apply


OFFLOADS = {"model": model_offload, "sequential": sequential_offload}
if not diffusers.__version__.startswith(("0.36.", "0.37.")):  # they need a GPU even to offload
    OFFLOADS["group, blocks"] = group_offload("block_level")
    OFFLOADS["group, leaves"] = group_offload("leaf_level")


@pytest.mark.parametrize("kind", OFFLOADS)
@pytest.mark.parametrize("first", [True, False], ids=["offload first", "accelerate first"])
def test_offload(kind: str, first: bool, accelerate: Accelerate) -> None:
    pipe = tiny.sdxl()
    before, picture = embeddings(pipe), tiny.picture(pipe)
    weights = bits(pipe)
    for step in (OFFLOADS[kind], accelerate) if first else (accelerate, OFFLOADS[kind]):
        step(pipe)
    for _ in range(2):  # diffusers takes the hooks off and on again after each picture
        reached = [served(m) for m in encoders(pipe)]
        assert abs(tiny.picture(pipe) - picture).max() < 0.05
        assert all(served(m) > n for m, n in zip(encoders(pipe), reached, strict=True))
    assert_close(before, embeddings(pipe))
    assert all(host._served(m).reasons.total() == 0 for m in encoders(pipe))
    with torch.no_grad():  # PyTorch under the hooks, too
        pipe.text_encoder(IDS, output_attentions=True)
    assert host._served(pipe.text_encoder).reasons.total() == 1
    assert_close(before, embeddings(pipe))
    octavo.restore(pipe)
    assert (tiny.picture(pipe) == picture).all()
    assert_same(before, embeddings(pipe))
    if "group" not in kind:
        without_hooks(pipe)
        assert_bits(weights, bits(pipe))
    assert not any(isinstance(v, host._Forward) for m in encoders(pipe) for v in vars(m).values())


def test_lora_under_offload(accelerate: Accelerate) -> None:
    pipe = accelerate(tiny.sd15())
    base = embeddings(pipe)
    for offload in (model_offload, sequential_offload):
        offload(pipe)
        pipe.load_lora_weights(lora(pipe, 1))
        got = embeddings(pipe)
        assert differs(base, got)
        assert_close(expected_embeddings(pipe), got)
        pipe.unload_lora_weights()
        assert_same(base, embeddings(pipe))
        without_hooks(pipe)
    assert host._served(pipe.text_encoder).reasons.total() == 0


def test_moves(accelerate: Accelerate) -> None:
    pipe = accelerate(tiny.sdxl())
    first = embeddings(pipe)
    pipe.to("cpu")
    assert_same(first, embeddings(pipe))
    pipe.to(torch.bfloat16)
    got = embeddings(pipe)
    assert all(t.dtype == torch.bfloat16 for t in got)
    assert_close(expected_embeddings(pipe), got)
    pipe.to(torch.float32)
    assert_close(first, embeddings(pipe))
    assert all(host._served(m).reasons.total() == 0 for m in encoders(pipe))


def test_parked_layers_come_home() -> None:
    """Host memory and device are one on a CPU; tests/gpu has the real thing."""

    def states(module: nn.Module) -> list[Tensor]:
        with torch.no_grad():
            return [module(IDS).last_hidden_state]

    module = tiny.clip_text(32)
    before = states(module)
    weights = {n: t.clone() for n, t in module.state_dict().items()}
    parts = parkable(module)
    assert len(parts) == 5
    parking.park(parkable(module), torch.device("cpu"))
    assert all(map(parking.is_parked, parts))
    twin = copy.deepcopy(module)
    again = pickle.loads(pickle.dumps(module))
    assert isinstance(tower_of(module), Tower)
    for one in (module, twin, again):
        parked = parkable(one)
        assert all(map(parking.is_parked, parked))
        assert_same(before, states(one))
        assert not any(map(parking.is_parked, parked))
        assert not any(part._forward_pre_hooks_with_kwargs for part in parked)
    parking.park(parkable(module), torch.device("cpu"))
    parking.park(parkable(module), torch.device("cpu"))
    parking.unpark(module, parkable(module), torch.device("cpu"))
    assert not any(part._forward_pre_hooks for part in parts)
    assert all(torch.equal(weights[n], t) for n, t in module.state_dict().items())


@pytest.mark.parametrize("kind", OFFLOADS)
def test_parked_layers_then_offloaded(kind: str, accelerate: Accelerate) -> None:
    """The offload hook takes the weights over; what waited to bring them back steps aside."""
    pipe = tiny.sd15()
    before = embeddings(pipe)
    accelerate(pipe)
    parking.park(parkable(pipe.text_encoder), torch.device("cpu"))
    OFFLOADS[kind](pipe)
    assert_same(before, expected_embeddings(pipe))
    assert not any(map(parking.is_parked, parkable(pipe.text_encoder)))
    assert_close(before, embeddings(pipe))
    assert served(pipe.text_encoder) == 2


# Copies and files


def test_saved_and_copied(accelerate: Accelerate, tmp_path: Path) -> None:
    pipe = tiny.sdxl()
    pipe.save_pretrained(tmp_path / "before")
    names = [list(m.state_dict()) for m in encoders(pipe)]
    parts = [[type(p) for p in m.modules()] for m in encoders(pipe)]
    accelerate(pipe)
    got = embeddings(pipe)
    pipe.save_pretrained(tmp_path / "after")
    for one in sorted((tmp_path / "before").rglob("*")):
        other = tmp_path / "after" / one.relative_to(tmp_path / "before")
        if one.suffix == ".safetensors":
            assert_bits(load_file(one), load_file(other))
        elif one.is_file() and "tokenizer" not in one.parent.name:  # these note how they were used
            assert one.read_bytes() == other.read_bytes(), one
    assert names == [list(m.state_dict()) for m in encoders(pipe)]
    assert parts == [[type(p) for p in m.modules()] for m in encoders(pipe)]

    twin = copy.deepcopy(pipe)
    reached = [served(m) for m in encoders(pipe)]
    assert_same(expected_embeddings(pipe), embeddings(twin))
    assert reached == [served(m) for m in encoders(pipe)]
    with torch.no_grad():
        for p in twin.text_encoder.parameters():
            p.mul_(1.1)
    assert differs(got, embeddings(twin))
    assert_same(got, embeddings(pipe))
    accelerate(twin)
    assert_close(expected_embeddings(twin), embeddings(twin))
    assert served(twin.text_encoder) and host._served(twin.text_encoder).reasons.total() == 0
    octavo.restore(twin)
    assert_same(got, embeddings(pipe))


def test_a_shallow_copy(accelerate: Accelerate, cache: Any) -> None:
    """It shares all parts, and stays when the model goes; then it can be accelerated itself."""
    module = octavo.accelerate(tiny.clip_text(32), cache=cache)
    expected, got = eager(module), states(module)
    gone, engine = weakref.ref(module), host._served(module)._encoder
    twin = copy.copy(module)
    assert_same(got, states(twin))
    del module
    gc.collect()
    assert gone() is None and engine._closed
    assert_same(expected, states(twin))
    core_of(twin).final_layer_norm.weight.data.mul_(2)
    assert differs(expected, states(twin))
    accelerate(twin)
    assert_close(eager(twin), states(twin))
    assert served(twin) == 1
    octavo.restore(twin)
    assert "forward" not in twin.__dict__


def test_pickled(accelerate: Accelerate) -> None:
    module = accelerate(tiny.clip_text(32))
    with torch.no_grad():
        got = module(IDS).last_hidden_state
        twin = pickle.loads(pickle.dumps(module))
        assert served(twin) == 0
        with plain(module):
            assert_same(module(IDS).last_hidden_state, twin(IDS).last_hidden_state)
        assert_same(got, module(IDS).last_hidden_state)
        accelerate(twin)
        assert_same(got, twin(IDS).last_hidden_state)


@pytest.mark.parametrize("offload", [model_offload, sequential_offload])
def test_copied_under_hooks(offload: Callable[[Any], None], accelerate: Accelerate) -> None:
    pipe = accelerate(tiny.sd15())
    offload(pipe)
    got = embeddings(pipe)
    twin = copy.deepcopy(pipe.text_encoder)
    reached = served(pipe.text_encoder)
    with torch.no_grad():
        out = twin(IDS).last_hidden_state
    assert_same(eager(pipe.text_encoder)[-1], out)
    assert served(pipe.text_encoder) == reached
    assert_same(got, embeddings(pipe))


# Sharing


def test_two_pipelines_share_an_encoder(accelerate: Accelerate) -> None:
    one = tiny.sd15()
    before = embeddings(one)
    two = diffusers.StableDiffusionImg2ImgPipeline(**one.components, requires_safety_checker=False)
    accelerate(one)
    accelerate(two)
    got = embeddings(one)
    engine = host._served(two.text_encoder)._encoder
    reached = served(one.text_encoder)
    with torch.no_grad():
        assert_same(got, list(two.encode_prompt("a photo of a cat", "cpu", 1, True)))
    assert served(one.text_encoder) == reached + 2
    octavo.restore(one)
    assert_same(got, embeddings(one))  # two still wants it
    assert host._served(one.text_encoder)._encoder is engine
    octavo.restore(one)
    octavo.restore(two)
    assert_same(before, embeddings(one))
    assert engine._closed


def test_from_pipe(cache: Any) -> None:
    one = octavo.accelerate(tiny.sdxl(), cache=cache)
    got = embeddings(one)
    two = diffusers.StableDiffusionXLImg2ImgPipeline.from_pipe(one)
    assert two.text_encoder is one.text_encoder
    reached = served(one.text_encoder)
    assert_same(got, embeddings(two))
    assert served(one.text_encoder) > reached
    with octavo.accelerating(two, cache=cache):  # joins, and leaves again
        pass
    assert_same(got, embeddings(one))
    del one
    gc.collect()
    assert_same(got, embeddings(two))  # the encoder lives, so does its engine
    octavo.restore(two)
    assert served(two.text_encoder) == 0


def test_context_manager(cache: Any) -> None:
    pipe = tiny.sd15()
    before = embeddings(pipe)
    with octavo.accelerating(pipe, cache=cache) as same:
        assert same is pipe
        inside = embeddings(pipe)
        with octavo.accelerating(pipe, cache=cache):
            assert_same(inside, embeddings(pipe))
        assert_same(inside, embeddings(pipe))
        assert served(pipe.text_encoder) == 6
    assert_same(before, embeddings(pipe))
    with pytest.raises(KeyError), octavo.accelerating(pipe, cache=cache):
        raise KeyError
    assert_same(before, embeddings(pipe))


def test_another_library_wraps_ours(accelerate: Accelerate) -> None:
    """As stable-fast does: what it kept of ours must become PyTorch when we are gone."""
    module = accelerate(tiny.clip_text(32))
    first = states(module)
    ours = module.forward
    module.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    assert_same(first, states(module))
    octavo.restore(module)
    assert_same(eager(module), states(module))
    pipe = tiny.sd15(module)
    accelerate(pipe)
    assert "forward is replaced by another library" in octavo.report(pipe)["text_encoder"].text()


# Leaks


def engines() -> list[TorchFp8Engine]:
    gc.collect()
    return [o for o in gc.get_objects() if isinstance(o, TorchFp8Engine) and o._weights is not None]


@pytest.mark.parametrize("offload", [None, model_offload, sequential_offload])
def test_deleted_while_its_engines_live(offload: Any, cache: Any) -> None:
    before = len(engines())
    pipe = octavo.accelerate(tiny.sdxl(), cache=cache)
    if offload:
        offload(pipe)
    embeddings(pipe)
    assert len(engines()) == before + 2
    modules = [weakref.ref(m) for m in encoders(pipe)]
    closed = [host._served(m)._encoder for m in encoders(pipe)]
    entries = len(host._registry)
    gc.disable()
    try:
        del pipe
        if not offload:  # no cycle: freed at once
            assert [m() for m in modules] == [None, None]
    finally:
        gc.enable()
    gc.collect()
    assert [m() for m in modules] == [None, None]
    assert all(c._closed for c in closed)
    del closed
    assert len(engines()) == before
    assert len(host._registry) == entries - 2


def test_nothing_stays_behind(cache: Any) -> None:
    pipe = tiny.sd15()
    module = pipe.text_encoder
    keys, weights = set(vars(module)), bits(pipe)
    before = len(engines())
    for _ in range(3):
        octavo.accelerate(pipe, cache=cache)
        embeddings(pipe)
        pipe.load_lora_weights(lora(pipe, 1))
        embeddings(pipe)
        factor = weakref.ref(
            next(p for n, p in module.named_parameters() if n.endswith("lora_A.default_0.weight"))
        )
        pipe.unload_lora_weights()
        embeddings(pipe)
        gc.collect()
        assert factor() is None
        octavo.restore(pipe)
        assert len(engines()) == before
    theirs = ("_hf_peft", "_output_capturing", "_weight_conversions")
    assert all(name.startswith(theirs) for name in set(vars(module)) - keys)
    assert_bits(weights, bits(pipe))


# All of it, twice


def test_sequence(accelerate: Accelerate) -> None:
    """One session; every answer is that of a pipeline which did nothing else."""
    pipe = accelerate(tiny.sdxl())
    files = {name: lora(pipe, seed) for seed, name in enumerate("ab")}
    answers: dict[str, list[Tensor]] = {}

    def step(name: str, *args: Any, **options: Any) -> None:
        got = embeddings(pipe, *args, **options)
        assert_close(expected_embeddings(pipe, *args, **options), got)
        if name in answers:
            assert_same(answers[name], got)
        answers.setdefault(name, [t.clone() for t in got])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            step("base")
            for name in "aba":
                pipe.load_lora_weights(dict(files[name]))
                step(name)
                pipe.unload_lora_weights()
            step("base")
            step("clip skip", clip_skip=1)
            step("long", "word " * 100)
            step("batch", ["a cat", "", "a dog"])
            step("empty", "")
            for encoder, tokenizer in (("", ""), ("_2", "_2")):
                module = getattr(pipe, f"text_encoder{encoder}")
                vector = torch.full((1, module.config.hidden_size), 0.5)
                pipe.load_textual_inversion(
                    vector,
                    token="<new>",
                    text_encoder=module,
                    tokenizer=getattr(pipe, f"tokenizer{tokenizer}"),
                )
            step("inversion", "a <new> cat")
            for n in ("", "_2"):
                pipe.unload_textual_inversion(
                    text_encoder=getattr(pipe, f"text_encoder{n}"),
                    tokenizer=getattr(pipe, f"tokenizer{n}"),
                )
            model_offload(pipe)
            step("base")
            pipe.load_lora_weights(dict(files["a"]))
            step("a")
            pipe.unload_lora_weights()
            without_hooks(pipe)
            step("base")
    assert all(host._served(m).reasons.total() == 0 for m in encoders(pipe))
    assert differs(answers["a"], answers["b"]) and differs(answers["base"], answers["a"])
