# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""accelerate(pipe): what pipelines and callers get, from an engine and from PyTorch."""

from __future__ import annotations

import functools
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import octavo
import pytest
import tiny_pipelines as tiny
import torch
import transformers
from asked import (
    assert_close,
    assert_same,
    core_of,
    embeddings,
    encoders,
    expected_embeddings,
    plain,
    served,
)
from octavo import prompts
from octavo.accelerated import AcceleratedEncoder
from octavo.device import Device
from octavo.engine_cache import EngineCache
from octavo.errors import CacheError, EngineUnavailable, OctavoError
from octavo.hosts import diffusers as host
from octavo.recipes import Floor
from torch import Tensor, nn
from torch.autograd import forward_ad

Accelerate = Callable[..., Any]
LONG = "a very long prompt about a cat that sits on a mat and looks at the moon " * 4


def ids_of(*rows: list[int], length: int = 77) -> Tensor:
    full = [[49406, *row[: length - 2], 49407] for row in rows]
    return torch.tensor([row + [49407] * (length - len(row)) for row in full])


IDS = ids_of([320, 1125, 539, 320, 2368], [5, 6, 7])


@torch.no_grad()
def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def eager(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with plain(module):
        return call(module, *args, **kwargs)


# Pipelines


@pytest.mark.parametrize("name", tiny.PIPELINES)
def test_pipeline(name: str, accelerate: Accelerate) -> None:
    pipe = tiny.PIPELINES[name]()
    before, picture = embeddings(pipe), tiny.picture(pipe)
    assert accelerate(pipe) is pipe
    got = embeddings(pipe)
    assert_close(before, got)
    assert all(served(m) >= 1 for m in encoders(pipe))
    reached = [served(m) for m in encoders(pipe)]
    assert abs(picture - tiny.picture(pipe)).max() < 0.05
    assert all(served(m) > n for m, n in zip(encoders(pipe), reached, strict=True))

    reports = octavo.report(pipe)
    assert {found.engine for found in reports.values()} == {"torch_fp8"}
    assert set(reports) == {n for n in pipe.components if "text_encoder" in n and getattr(pipe, n)}

    assert octavo.restore(pipe) is pipe
    assert_same(before, embeddings(pipe))
    assert (picture == tiny.picture(pipe)).all()
    assert all("forward" not in m.__dict__ for m in encoders(pipe))


PROMPTS: dict[str, dict[str, dict[str, Any]]] = {
    "sd15": {
        "negative": {"negative_prompt": "blurry"},
        "batch": {"prompt": ["a cat", "a dog", ""], "negative_prompt": ["x", "", "y"]},
        "images": {"num_images_per_prompt": 3},
        "long": {"prompt": LONG},
        "long negative": {"negative_prompt": LONG},
        "no guidance": {"do_classifier_free_guidance": False},
        "empty": {"prompt": ""},
    },
    "sdxl": {
        "prompts": {"prompt_2": "in oil", "negative_prompt": "x", "negative_prompt_2": "y"},
        "batch": {"prompt": ["a cat", "a dog"], "num_images_per_prompt": 2},
        "clip skip 1": {"clip_skip": 1},
        "clip skip 2": {"clip_skip": 2, "negative_prompt": "x"},
        "long": {"prompt": LONG, "prompt_2": "short", "negative_prompt": LONG},
    },
    "sd3": {
        "prompts": {"prompt_2": "in oil", "prompt_3": "on canvas", "negative_prompt_3": "z"},
        "clip skip": {"clip_skip": 1},
        "batch": {"prompt": ["a cat", LONG]},
    },
    "flux": {"prompts": {"prompt_2": "in oil"}, "batch": {"prompt": ["a cat", LONG]}},
    "sdxl_refiner": {"negative": {"negative_prompt": "blurry"}},
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(name: str, accelerate: Accelerate) -> None:
    pipe = accelerate(tiny.PIPELINES[name]())
    for options in PROMPTS[name].values():
        before = [served(m) for m in encoders(pipe)]
        got = embeddings(pipe, **options)
        assert all(served(m) > n for m, n in zip(encoders(pipe), before, strict=True))
        assert_close(expected_embeddings(pipe, **options), got)


def test_sd15_clip_skip(accelerate: Accelerate) -> None:
    """diffusers reaches for `text_encoder.text_model`, which transformers 5.6 took away."""
    pipe = accelerate(tiny.sd15())
    if not hasattr(pipe.text_encoder, "text_model"):
        for run in (embeddings, expected_embeddings):
            with pytest.raises(AttributeError, match="text_model"):
                run(pipe, clip_skip=1)
        return
    assert_close(expected_embeddings(pipe, clip_skip=1), embeddings(pipe, clip_skip=1))


def test_answers_do_not_change_later(accelerate: Accelerate) -> None:
    pipe = accelerate(tiny.sdxl())
    first = embeddings(pipe, "a cat")
    kept = [t.clone() for t in first]
    embeddings(pipe, "a dog")
    assert_same(kept, first)
    assert_same(kept, embeddings(pipe, "a cat"))


def test_two_components_of_three(accelerate: Accelerate) -> None:
    pipe = accelerate(tiny.sd3(), components=["text_encoder_2"])
    assert_close(expected_embeddings(pipe), embeddings(pipe))
    assert (served(pipe.text_encoder), served(pipe.text_encoder_2)) == (0, 2)
    assert "not accelerated" in octavo.report(pipe)["text_encoder"].text()


def test_unknown_encoders_keep_pytorch(
    accelerate: Accelerate, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = tiny.sd3()
    pipe.text_encoder_3 = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=2
        )
    )
    accelerate(pipe)
    reason = "BertModel is no text encoder that Octavo has engines for"
    assert f"text_encoder_3: PyTorch keeps serving it: {reason}" in caplog.text
    found = octavo.report(pipe)
    assert (found["text_encoder_3"].engine, found["text_encoder_3"].family) == ("host", "BertModel")
    assert reason in found["text_encoder_3"].text()
    assert "the first prompt chooses" in found["text_encoder_2"].text()
    with pytest.raises(OctavoError, match=f"text_encoder_3 cannot be accelerated: {reason}"):
        accelerate(pipe, components=["text_encoder_3"])


# One model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("projection", [None, 48])
@pytest.mark.parametrize("end_token", [2, 49407])
def test_outputs(
    dtype: torch.dtype, projection: int | None, end_token: int, accelerate: Accelerate
) -> None:
    torch.manual_seed(0)
    module = tiny.clip_text(32, projection=projection, end_token=end_token).to(dtype)
    assert accelerate(module) is module
    mask = (torch.arange(77) < torch.tensor([[7], [5]])).long()
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((IDS,), {}),
        ((IDS[:1, :9],), {"output_hidden_states": False}),
        ((), {"input_ids": IDS, "output_hidden_states": True}),
        ((IDS,), {"return_dict": False}),
        ((IDS,), {"return_dict": False, "output_hidden_states": True}),
        ((IDS, None), {"return_dict": True, "output_attentions": False, "position_ids": None}),
        ((IDS, torch.ones_like(mask)), {"output_hidden_states": True}),
        ((IDS, mask), {"output_hidden_states": True, "return_dict": True}),  # as compel calls
        ((IDS,), {"attention_mask": mask.bool()}),
        ((IDS.repeat(9, 1),), {"output_hidden_states": None}),
        ((IDS.int(),), {}),
    ]
    for n, (args, kwargs) in enumerate(calls):
        got, expected = call(module, *args, **kwargs), eager(module, *args, **kwargs)
        assert served(module) == n + 1, (args, kwargs)
        assert type(got) is type(expected)
        if isinstance(expected, tuple):
            assert_close(expected, got)
            continue
        assert list(got) == list(expected)
        assert_close(expected.to_tuple(), got.to_tuple())
        if kwargs.get("output_hidden_states"):
            assert len(got.hidden_states) == 4
            normed = call(core_of(module).final_layer_norm, got.hidden_states[-1])
            assert_close(got.last_hidden_state, normed, 0.999, 0.99)


def test_pooled_at_the_hosts_position(accelerate: Accelerate) -> None:
    """Configs that say end token 2 pool at the largest id, also where that is an added token."""
    torch.manual_seed(0)
    module = tiny.clip_text(32)
    module.resize_token_embeddings(49410)
    ids = ids_of([320, 49409, 2368, 5])
    accelerate(module)
    got = call(module, ids)
    assert_same(got.last_hidden_state[:, 2], got.pooler_output)
    assert_close(eager(module, ids).pooler_output, got.pooler_output)
    assert served(module) == 1


def test_under_inference_mode(accelerate: Accelerate) -> None:
    """What is made inside must be of use outside."""
    module = accelerate(tiny.clip_text(32))
    with torch.inference_mode():
        inside = module(IDS).last_hidden_state
    outside = call(module, IDS).last_hidden_state
    assert_same(inside.clone(), outside.clone())
    with torch.no_grad():
        module.encoder_weight = None  # any attribute may be set, as before
        for p in module.parameters():
            p.mul_(1.01)
    assert_close(eager(module, IDS).last_hidden_state, call(module, IDS).last_hidden_state)
    assert served(module) == 3


def test_signature_is_kept(accelerate: Accelerate) -> None:
    import inspect

    module = tiny.clip_text(32)
    before = inspect.signature(module.forward)
    accelerate(module)
    assert inspect.signature(module.forward) == before


def test_hooks_on_the_model_itself_run(accelerate: Accelerate) -> None:
    module, seen = tiny.clip_text(32), []
    module.register_forward_hook(lambda m, a, o: seen.append(o))
    accelerate(module)
    got = call(module, IDS)
    assert served(module) == 1 and seen[0] is got


# PyTorch's transforms


def gradients(module: nn.Module) -> Tensor:
    weights = {name: p.detach() for name, p in module.named_parameters()}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(module, weights, (IDS,)).last_hidden_state.pow(2).sum()

    found = torch.func.grad(loss)(weights)
    return torch.cat([g.flatten() for n, g in found.items() if "fc1" in n])


def over_rows(module: nn.Module) -> Tensor:
    with torch.no_grad():
        return torch.vmap(lambda row: module(row[None]).last_hidden_state)(IDS)


def forward_gradients(module: Any) -> Tensor:
    module.set_attn_implementation("eager")  # the others have no forward gradients
    with torch.no_grad(), forward_ad.dual_level():
        duals = {n: forward_ad.make_dual(p, p + 1) for n, p in module.named_parameters()}
        out = torch.func.functional_call(module, duals, (IDS,)).last_hidden_state
        return forward_ad.unpack_dual(out).tangent


def exported(module: nn.Module) -> Tensor:
    with torch.no_grad():
        return torch.export.export(module, (IDS,)).module()(IDS).last_hidden_state


def traced(module: nn.Module) -> Tensor:
    def last(ids: Tensor) -> Tensor:
        return module(ids).last_hidden_state

    with torch.no_grad():
        return torch.jit.trace(last, IDS, check_trace=False)(IDS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("transform", [gradients, over_rows, forward_gradients, exported, traced])
def test_transforms_are_pytorchs(
    transform: Callable[[Any], Tensor], accelerate: Accelerate
) -> None:
    module = accelerate(tiny.clip_text(32).eval().requires_grad_(False))
    call(module, IDS)
    with plain(module):
        expected = transform(module)
    assert_same(expected, transform(module))
    assert served(module) == 1


# What PyTorch answers, bit for bit

NOT_OURS: dict[str, tuple[str, Callable[[nn.Module], Any]]] = {
    "attentions": ("attentions", lambda m: call(m, IDS, output_attentions=True)),
    "positions": ("positions", lambda m: call(m, IDS, position_ids=torch.arange(77)[None] * 0)),
    "first key masked": (
        "",
        lambda m: call(m, IDS, attention_mask=(torch.arange(77) > 3).long().expand(2, 77)),
    ),
    "float mask": ("mask", lambda m: call(m, IDS, attention_mask=torch.ones(2, 77))),
    "odd mask": ("mask", lambda m: call(m, IDS, attention_mask=torch.full((2, 77), 2))),
    "training": ("training", lambda m: call(m.train(), IDS)),
    "gradients": ("gradients", lambda m: m(IDS)),
    "autocast": ("autocast", lambda m: autocast(m)),
    "config": ("config", lambda m: with_config(m, output_hidden_states=True)),
    "tuple config": ("config", lambda m: with_config(m, return_dict=False)),
}


def autocast(module: nn.Module) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return call(module, IDS)


def with_config(module: Any, **changes: Any) -> Any:
    for name, value in changes.items():
        setattr(module.config, name, value)
    return call(module, IDS)


@pytest.mark.parametrize("case", NOT_OURS)
def test_pytorch_answers(case: str, accelerate: Accelerate) -> None:
    reason, run = NOT_OURS[case]
    module = accelerate(tiny.clip_text(32))
    call(module, IDS)
    got = run(module)
    assert served(module) == 1
    with plain(module):
        expected = run(module)
    assert type(got) is type(expected)
    if not isinstance(expected, tuple):
        assert list(expected) == list(got)
        expected, got = expected.to_tuple(), got.to_tuple()
    assert_same(expected, got)
    if case == "gradients":
        assert got[0].requires_grad
    assert reason in octavo.report(module)["CLIPTextModel"].text()


def test_float64(accelerate: Accelerate) -> None:
    module = accelerate(tiny.clip_text(32)).double()
    try:
        expected = eager(module, IDS).last_hidden_state
    except RuntimeError as error:  # transformers 4.57 cannot
        with pytest.raises(RuntimeError, match=str(error)):
            call(module, IDS)
        return
    assert_same(expected, call(module, IDS).last_hidden_state)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"input_ids": None},
        {"inputs_embeds": torch.zeros(1, 77, 32)},
        {"input_ids": torch.zeros(1, 78, dtype=torch.long)},
        {"input_ids": torch.full((1, 77), 49408)},
        {"input_ids": torch.zeros(1, 77)},
    ],
)
def test_errors_are_the_models_own(arguments: dict[str, Any], accelerate: Accelerate) -> None:
    module = accelerate(tiny.clip_text(32))
    with pytest.raises(Exception) as expected:
        eager(module, **arguments)
    with pytest.raises(type(expected.value)) as got:
        call(module, **arguments)
    assert str(got.value) == str(expected.value)


def layer(module: nn.Module) -> Any:
    return core_of(module).encoder.layers[1]


def patch_forward(module: nn.Module) -> None:
    attention = layer(module).self_attn
    original = attention.forward
    attention.forward = lambda *a, **k: original(*a, **k)


def add_model_hook(module: nn.Module) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    add_hook_to_module(layer(module).mlp, ModelHook())


def own_attention(module: Any) -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def louder(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(module, query * 4, *args, **kwargs)

    AttentionInterface.register("louder", louder)
    module.set_attn_implementation("louder")


def turned_positions(module: Any) -> None:
    embeddings = core_of(module).embeddings
    embeddings.position_ids = embeddings.position_ids.flip(1)


FOREIGN: dict[str, Callable[[Any], object]] = {
    "attention": own_attention,
    "attention's scale": lambda m: setattr(layer(m).self_attn, "scale", 3.0),
    "norm's eps": lambda m: setattr(layer(m).layer_norm1, "eps", 10.0),
    "positions": turned_positions,
    "hook": lambda m: layer(m).register_forward_hook(lambda *_: None),
    "pre-hook": lambda m: layer(m).mlp.fc1.register_forward_pre_hook(lambda *_: None),
    "forward": patch_forward,
    "accelerate hook": add_model_hook,
    "another activation": lambda m: setattr(layer(m).mlp, "activation_fn", nn.Tanh()),
    "a layer of another class": lambda m: setattr(layer(m).mlp, "fc1", torch.nn.Identity()),
    "compile": lambda m: m.compile(backend="eager"),
}


@pytest.mark.parametrize("case", FOREIGN)
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_other_libraries_inside(
    case: str, first: bool, accelerate: Accelerate, caplog: pytest.LogCaptureFixture
) -> None:
    """Who changes the inside of the encoder wants to see it run."""
    module = tiny.clip_text(32 if "class" not in case else 128)
    pipe = tiny.sd15(module)
    if first:
        FOREIGN[case](module)
    accelerate(pipe)
    if not first:
        ids = IDS
        call(module, ids)
        assert served(module) == 1
        FOREIGN[case](module)
    if "class" not in case:
        got = call(module, IDS).last_hidden_state
        assert_same(eager(module, IDS).last_hidden_state, got)
    assert served(module) == (0 if first else 1)
    assert octavo.report(pipe)["text_encoder"].refusals
    assert (len(caplog.records) > 0) or "class" in case


def test_positions_changed_in_place(accelerate: Accelerate) -> None:
    """A model that moves has other buffers, which is no change; one of them is then changed."""
    module = accelerate(tiny.clip_text(32))
    embeddings = core_of(module).embeddings
    before = call(module, IDS).last_hidden_state
    tower = host._served(module)._tower
    embeddings.position_ids = embeddings.position_ids.clone()
    assert_same(before, call(module, IDS).last_hidden_state)
    with torch.inference_mode():
        embeddings.position_ids = embeddings.position_ids.clone()
    assert_same(before, call(module, IDS).last_hidden_state)
    embeddings.position_ids = torch.arange(77)[None]
    assert_same(before, call(module, IDS).last_hidden_state)
    assert host._served(module)._tower is tower and served(module) == 4
    embeddings.position_ids.copy_(torch.arange(77).flip(0))
    assert_same(eager(module, IDS).last_hidden_state, call(module, IDS).last_hidden_state)
    assert served(module) == 4
    assert "positions are not" in octavo.report(module)["CLIPTextModel"].text()


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_class_is_patched(
    wrapped: bool, first: bool, accelerate: Accelerate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrapper bears the module's name of what it wraps."""
    module = tiny.clip_text(32)
    kind = type(layer(module).mlp)
    original = kind.forward

    def patch(self: Any, x: Tensor) -> Tensor:
        return original(self, x) * 0

    with monkeypatch.context() as patched:
        if first:
            patched.setattr(kind, "forward", functools.wraps(original)(patch) if wrapped else patch)
            with pytest.raises(OctavoError, match="the forward of CLIPMLP is replaced"):
                accelerate(module)
            return
        accelerate(module)
        before = call(module, IDS).last_hidden_state
        patched.setattr(kind, "forward", functools.wraps(original)(patch) if wrapped else patch)
        assert_same(eager(module, IDS).last_hidden_state, call(module, IDS).last_hidden_state)
        assert served(module) == 1
    assert_same(before, call(module, IDS).last_hidden_state)
    assert served(module) == 2


def test_a_forward_is_replaced_by_another(accelerate: Accelerate) -> None:
    """Where every part has one of its own already: hooks of accelerate came and went."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

    module = tiny.clip_text(32)
    for part in list(layer(module).modules()):
        add_hook_to_module(part, AlignDevicesHook(execution_device="cpu"))
    remove_hook_from_module(layer(module), recurse=True)
    assert "forward" in layer(module).mlp.__dict__
    accelerate(module)
    call(module, IDS)
    assert served(module) == 1
    layer(module).mlp.forward = lambda x: x * 0
    assert_same(eager(module, IDS).last_hidden_state, call(module, IDS).last_hidden_state)
    assert served(module) == 1


def test_a_hook_takes_the_place_of_another(accelerate: Accelerate) -> None:
    """transformers' recorders leave with a foreign hook in their stead: as many as before."""
    module = tiny.clip_text(32)

    def recorder(*_: Any) -> None: ...

    recorder.__module__ = "transformers.utils.output_capturing"
    handle = layer(module).register_forward_hook(recorder)
    accelerate(module)
    call(module, IDS)
    assert served(module) == 1
    handle.remove()
    layer(module).register_forward_hook(lambda m, args, out: out * 0)
    assert_same(eager(module, IDS).last_hidden_state, call(module, IDS).last_hidden_state)
    assert served(module) == 1


def test_dropout_that_is_set_later(accelerate: Accelerate) -> None:
    module = accelerate(tiny.clip_text(32).eval())
    call(module, IDS)
    layer(module).self_attn.dropout = 0.9
    call(module, IDS)
    assert served(module) == 2
    core_of(module).encoder.train()
    call(module, IDS)
    assert served(module) == 2
    assert "training mode" in octavo.report(module)["CLIPTextModel"].text()


def test_a_hook_that_goes_away(accelerate: Accelerate) -> None:
    module = accelerate(tiny.clip_text(32))
    handle = layer(module).register_forward_hook(lambda *_: None)
    call(module, IDS)
    assert served(module) == 0
    handle.remove()
    call(module, IDS)
    assert served(module) == 1


def test_transformers_own_hooks_are_no_obstacle(accelerate: Accelerate) -> None:
    module = tiny.clip_text(32)
    call(module, IDS, output_hidden_states=True)  # transformers 5 leaves recorders on the layers
    accelerate(module)
    call(module, IDS)
    assert served(module) == 1


def test_torch_compile_around_it(accelerate: Accelerate) -> None:
    pipe = accelerate(tiny.sd15())
    expected = expected_embeddings(pipe)
    pipe.text_encoder = torch.compile(pipe.text_encoder, backend="eager")
    assert_same(expected, embeddings(pipe))
    octavo.restore(pipe)
    assert "forward" not in pipe.text_encoder._orig_mod.__dict__
    assert "compiled" in octavo.report(pipe)["text_encoder"].text()
    with pytest.raises(OctavoError, match="it is compiled"):
        accelerate(pipe, components="text_encoder")


# Weights that must not be touched


class Linear4bit(nn.Linear):
    """bitsandbytes' way: a class of its own."""


def subclassed(module: nn.Module) -> None:
    """torchao's way: a plain nn.Linear over a tensor subclass."""
    from torch.testing._internal.two_tensor import TwoTensor

    linear = layer(module).mlp.fc1
    data = linear.weight.detach()
    linear.weight = nn.Parameter(TwoTensor(data, data.clone()))


def float8(module: nn.Module) -> None:
    """diffusers' layerwise casting: float8 weights under a hook."""
    from diffusers.hooks import apply_layerwise_casting

    apply_layerwise_casting(module, torch.float8_e4m3fn, torch.float32, [])


def a_class_of_its_own(module: nn.Module) -> None:
    linear = Linear4bit(32, 128)
    layer(module).mlp.fc1 = linear


def int8(module: nn.Module) -> None:
    fc1 = layer(module).mlp.fc1
    fc1.weight = nn.Parameter(fc1.weight.detach().to(torch.int8), requires_grad=False)


QUANTIZED: dict[str, tuple[str, Callable[[Any], object]]] = {
    "class": ("Linear4bit", a_class_of_its_own),
    "subclass": ("TwoTensor", subclassed),
    "layerwise casting": ("float8_e4m3fn", float8),
    "int8": ("int8", int8),
    "meta": ("meta", lambda m: layer(m).to("meta")),
    "vocabulary": ("vocabulary", lambda m: m.resize_token_embeddings(1000)),
    "mixed dtypes": ("several dtypes", lambda m: layer(m).half()),
}


@pytest.mark.parametrize("case", QUANTIZED)
def test_weights_left_alone(
    case: str, accelerate: Accelerate, caplog: pytest.LogCaptureFixture
) -> None:
    reason, change = QUANTIZED[case]
    pipe = tiny.sdxl()
    change(pipe.text_encoder)
    accelerate(pipe)
    assert any(reason in r.getMessage() for r in caplog.records)
    assert reason in octavo.report(pipe)["text_encoder"].text()
    assert served(pipe.text_encoder) == 0
    call(pipe.text_encoder_2, IDS)
    assert served(pipe.text_encoder_2) == 1
    with pytest.raises(OctavoError, match=f"text_encoder cannot be accelerated: .*{reason}"):
        accelerate(pipe, components="text_encoder")


# Bad input


def test_no_text_encoders() -> None:
    accelerate = octavo.accelerate
    unet = tiny._unet(32)
    pipe = diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler())
    for function in (accelerate, octavo.restore, octavo.report):
        with pytest.raises(OctavoError, match=r"DDPMPipeline has no text encoder; .* unet"):
            function(pipe)
    with pytest.raises(OctavoError, match="a str cannot be accelerated"):
        accelerate("stable-diffusion")
    with pytest.raises(OctavoError, match="UNet2DConditionModel is no text encoder"):
        accelerate(unet)


def test_encoders_that_are_none(accelerate: Accelerate) -> None:
    pipe = tiny.sd15()
    pipe.text_encoder = None
    assert accelerate(pipe) is pipe  # its prompt embeddings come from elsewhere
    assert octavo.report(pipe) == {}
    assert octavo.restore(pipe) is pipe
    with pytest.raises(OctavoError, match="'text_encoder' loaded; it has none"):
        accelerate(pipe, components="text_encoder")
    with pytest.raises(OctavoError, match="'text_encoder_9' loaded; it has text_encoder_2"):
        accelerate(tiny.sdxl_refiner(), components=["text_encoder_9"])
    for nothing in ("", [], ()):
        with pytest.raises(OctavoError, match=r"components is empty|no text encoder ''"):
            accelerate(tiny.sd15(), components=nothing)


def test_unknown_engine_in_the_environment(
    accelerate: Accelerate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said at once and not at the first prompt."""
    monkeypatch.setenv("OCTAVO_ENGINE", "openvino")
    with pytest.raises(OctavoError, match=r"^OCTAVO_ENGINE: the engine 'openvino' does not exi"):
        accelerate(tiny.sd15())


@pytest.mark.parametrize(
    ("variable", "value"),
    [("OCTAVO_CACHE", "~nobody-is-called-this/x"), ("OCTAVO_CACHE_BUDGET", "much")],
)
def test_a_bad_cache_is_said_at_once(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    module = tiny.clip_text(32)
    with pytest.raises(OctavoError, match=value):
        octavo.accelerate(module)
    assert host._served(module) is None


def test_no_folder_is_made_before_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    module = octavo.accelerate(tiny.clip_text(32))
    assert not list(tmp_path.iterdir())
    call(module, IDS)
    assert list(tmp_path.iterdir()) and served(module) == 1
    octavo.restore(module)


def test_accelerated_again_it_tries_again(
    accelerate: Accelerate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full, and the user has made room; what serves is left alone."""
    module = tiny.clip_text(32)
    store = EngineCache(tmp_path)
    with monkeypatch.context() as full:

        def put(*_: Any, **__: Any) -> Any:
            raise CacheError(tmp_path, "the disk is full", "make room")

        full.setattr(EngineCache, "put", put)
        full.setattr(EngineCache, "adopt", put)
        accelerate(module, cache=store)
        call(module, IDS)
        assert served(module) == 0
        assert "the disk is full" in octavo.report(module)["CLIPTextModel"].text()
    call(module, IDS)
    assert served(module) == 0
    accelerate(module, cache=store)
    call(module, IDS)
    assert served(module) == 1
    engine = host._served(module)._encoder
    accelerate(module, cache=store)
    call(module, IDS)
    assert served(module) == 2 and host._served(module)._encoder is engine


def test_unknown_options(accelerate: Accelerate) -> None:
    pipe = tiny.sd15()
    with pytest.raises(OctavoError, match="recipe 'int4' does not exist"):
        accelerate(pipe, recipe="int4")
    with pytest.raises(OctavoError, match="engine 'openvino' does not exist"):
        accelerate(pipe, engine="openvino")
    with pytest.raises(OctavoError, match="and three cosines are needed; give"):
        accelerate(pipe, floor=0.9)
    with pytest.raises(OctavoError, match="cache is empty; name a folder, or leave it out"):
        accelerate(pipe, cache="")
    with pytest.raises(OctavoError, match="calibration_prompts hold 3; they must be texts"):
        accelerate(pipe, calibration_prompts=["a cat", 3])
    with pytest.raises(OctavoError, match="calibration_prompts hold 5; they must be texts"):
        accelerate(pipe, calibration_prompts=5)
    with pytest.raises(OctavoError, match="components hold 5; they must be names"):
        accelerate(pipe, components=5)
    with pytest.raises(OctavoError, match="components hold None; they must be names"):
        accelerate(pipe, components=["text_encoder", None])
    for nothing in (5, b"folder", False):
        with pytest.raises(OctavoError, match=r"cache is .*; name a folder, or leave it out"):
            accelerate(pipe, cache=nothing)
    with pytest.raises(OctavoError, match="give the whole pipeline"):
        accelerate(tiny.clip_text(), calibration_prompts=["a cat"])
    assert not host._registry.get(pipe.text_encoder)
    one, many = (
        host._tokens(pipe, "text_encoder", pipe.text_encoder, prompts)
        for prompts in (host._texts("calibration_prompts", "a cat", "texts"), ["a cat"])
    )
    assert one == many and len(one) == 1


def test_on_a_cpu(accelerate: Accelerate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "facts", lambda device: (None, None))
    pipe = accelerate(tiny.sd15())
    assert_same(expected_embeddings(pipe), embeddings(pipe))
    assert "needs an NVIDIA GPU and the encoder is on the device 'cpu'" in (
        octavo.report(pipe)["text_encoder"].text()
    )
    accelerate(pipe, engine="torch_fp8")
    with pytest.raises(EngineUnavailable, match="torch_fp8"):
        embeddings(pipe)


def test_old_gpu(accelerate: Accelerate, monkeypatch: pytest.MonkeyPatch) -> None:
    turing = Device("cuda", 0, "NVIDIA GeForce RTX 2080", 75)
    monkeypatch.setattr(host, "facts", lambda device: (turing, None))
    pipe = accelerate(tiny.sd15())
    assert_same(expected_embeddings(pipe), embeddings(pipe))
    assert "no FP8 tensor cores" in octavo.report(pipe)["text_encoder"].text()


def test_weights_that_are_not_finite(accelerate: Accelerate) -> None:
    module = tiny.clip_text(32)
    with torch.no_grad():
        layer(module).mlp.fc1.weight[0, 0] = float("nan")
    accelerate(module)
    got, expected = call(module, IDS).last_hidden_state, eager(module, IDS).last_hidden_state
    assert torch.equal(got.isnan(), expected.isnan())
    assert served(module) == 0
    assert "NaN" in octavo.report(module)["CLIPTextModel"].text()


def test_a_floor_that_nothing_reaches(accelerate: Accelerate) -> None:
    pipe = accelerate(tiny.sd15(), floor=Floor(0.99999999, 0.99999999, 0.99999999))
    assert_same(expected_embeddings(pipe), embeddings(pipe))
    found = octavo.report(pipe)["text_encoder"]
    assert found.engine == "host" and "under the floor" in found.text()


def test_options_reach_the_engine(accelerate: Accelerate, tmp_path: Any) -> None:
    pipe, events = tiny.sd15(), []
    accelerate(pipe, recipe="fp8-mixed", cache=tmp_path / "mine", progress=events.append)
    embeddings(pipe)
    found = octavo.report(pipe)["text_encoder"]
    assert (found.engine, found.recipe) == ("torch_fp8", "fp8-mixed")
    assert (tmp_path / "mine").is_dir()
    assert {e.subject for e in events} == {"text_encoder"} and len(events) > 3


def test_accelerate_twice(accelerate: Accelerate) -> None:
    """With equal options nothing happens; with others the encoder changes over."""
    pipe = accelerate(tiny.sd15())
    first = embeddings(pipe)
    engine = host._served(pipe.text_encoder)._encoder
    accelerate(pipe)
    assert host._served(pipe.text_encoder)._encoder is engine
    assert_same(first, embeddings(pipe))
    accelerate(pipe, recipe="bf16")
    embeddings(pipe)
    assert octavo.report(pipe)["text_encoder"].recipe == "bf16"
    octavo.restore(octavo.restore(pipe))
    assert "forward" not in pipe.text_encoder.__dict__


def test_calibration_prompts(accelerate: Accelerate) -> None:
    """The user's prompts, by the pipeline's own tokenizer, widen the input ranges."""
    pipe = tiny.sd15()
    (rare,) = pipe.tokenizer("q").input_ids[1:-1]
    assert all(rare not in row for row in prompts.load_tokens("calibration"))
    with torch.no_grad():  # one value so far out that the first norm makes it the largest of all
        pipe.text_encoder.get_input_embeddings().weight[rare, 3] = 50

    def first_scale() -> float:
        embeddings(pipe)
        encoder = host._served(pipe.text_encoder)._encoder
        linears = encoder._serving.weights.linears
        return float(linears["text_model.encoder.layers.0.self_attn.q_proj"].input_scale)

    accelerate(pipe)
    shipped = first_scale()
    accelerate(pipe, calibration_prompts=["a cat"])
    assert first_scale() == shipped
    accelerate(pipe, calibration_prompts=["q q q"])
    assert first_scale() > shipped
    assert_close(expected_embeddings(pipe), embeddings(pipe))


def test_reports_before_the_first_prompt(accelerate: Accelerate) -> None:
    pipe = tiny.sdxl()
    assert "call octavo.accelerate" in octavo.report(pipe)["text_encoder_2"].text()
    accelerate(pipe)
    assert "the first prompt chooses" in octavo.report(pipe)["text_encoder_2"].text()


def test_what_pytorch_answered_is_counted_and_logged_once(
    accelerate: Accelerate, caplog: pytest.LogCaptureFixture
) -> None:
    module = accelerate(tiny.clip_text(32))
    for _ in range(3):
        module(IDS)
    assert "gradients are on; call it under torch.no_grad() (3 requests)" in (
        octavo.report(module)["CLIPTextModel"].text()
    )
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1


def test_background(accelerate: Accelerate, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may arrive later: PyTorch's first answer is not the last word."""
    module = accelerate(tiny.clip_text(32), background=True)
    with monkeypatch.context() as at_first:
        at_first.setattr(AcceleratedEncoder, "attempt", lambda *_: None)
        assert_same(eager(module, IDS).last_hidden_state, call(module, IDS).last_hidden_state)
    call(module, IDS)
    assert served(module) == 1


# The package


def test_import_is_light() -> None:
    code = """
import json, sys, time
start = time.perf_counter()
import octavo
seconds = time.perf_counter() - start
public = ("accelerate", "accelerating", "recipes", "report", "restore")
names = [n for n in public if n in dir(octavo)]
heavy = {"torch", "tensorrt", "modelopt", "onnx", "onnxruntime", "transformers", "diffusers"}
before = sorted(heavy & set(sys.modules))
octavo.recipes.Floor(token_mean=0.9, token_min=0.9, pooled=0.9)
octavo.accelerate
after = sorted(heavy & set(sys.modules))
try:
    octavo.nothing
except AttributeError as error:
    missing = str(error)
print(json.dumps([seconds, names, before, after, missing]))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, names, before, after, missing = json.loads(run.stdout)
    assert seconds < 0.5  # 50 ms on a machine with nothing else to do
    assert len(names) == 5 and before == [] and after == ["torch"]
    assert missing == "module 'octavo' has no attribute 'nothing'"
