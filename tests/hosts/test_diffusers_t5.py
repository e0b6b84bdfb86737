# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""accelerate(pipe): T5, mT5 and umT5, alone and in pipelines."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate as hf_accelerate
import octavo
import pytest
import t5_pipelines
import tiny_pipelines as tiny
import torch
import transformers
from asked import (
    assert_close,
    assert_same,
    embeddings,
    encoders,
    expected_embeddings,
    parkable,
    plain,
    reorder,
    served,
)
from octavo.encoders import T5Spec
from octavo.errors import OctavoError
from octavo.hosts import diffusers as host
from octavo.hosts import parking
from octavo.hosts.families import tower_of
from octavo.hosts.tower import Tower
from octavo.recipes import Floor
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from test_diffusers_weights import (
    OFFLOADS,
    assert_bits,
    bits,
    model_offload,
    sequential_offload,
    without_hooks,
)
from torch import Tensor, nn

Accelerate = Callable[..., Any]
IDS = torch.tensor([[5, 9, 30, 7, 1, 0, 0, 0], [40, 50, 60, 70, 80, 90, 100, 1]])
MASK = (IDS != 0).long()
# The recipe's floor is for a T5-XXL; changed weights of encoders 32 values wide scatter below it.
NARROW = Floor(token_mean=0.99, token_min=0.9, pooled=0.0)
KINDS: dict[str, dict[str, Any]] = {
    "T5": {},
    "MT5": {"kind": "MT5"},
    "UMT5": {"kind": "UMT5"},
    "the first T5": {"feed_forward": "relu"},
    "one block": {"layers": 1},
}
FP16_AS_LOADED = "float16, wo in float32"
DTYPES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "float32": lambda m: m,
    "bfloat16": lambda m: m.to(torch.bfloat16),
    "float16": lambda m: m.to(torch.float16),
    FP16_AS_LOADED: lambda m: as_loaded(m),
}


def as_loaded(module: nn.Module) -> nn.Module:
    """What `from_pretrained(torch_dtype=torch.float16)` makes of it."""
    module.to(torch.float16)
    for name, part in module.named_modules():
        if name.endswith(".wo"):
            part.float()
    return module


def model(case: str = "T5", dtype: str = "float32", **options: Any) -> Any:
    torch.manual_seed(0)
    return DTYPES[dtype](tiny.t5_text(**{**KINDS[case], **options}))


@torch.no_grad()
def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def eager(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with plain(module):
        return call(module, *args, **kwargs)


def last(module: nn.Module, ids: Tensor = IDS) -> Tensor:
    found: Tensor = call(module, ids).last_hidden_state
    return found


def name_of(module: nn.Module) -> str:
    return type(module).__name__


# Recognition


@pytest.mark.parametrize("case", KINDS)
def test_what_is_recognised(case: str) -> None:
    tower = tower_of(model(case))
    assert isinstance(tower, Tower)
    assert tower.spec == T5Spec(
        1 if case == "one block" else 2, 32, 128, 4, 8, 256,
        case != "the first T5", "relu" if case == "the first T5" else "gelu_tanh", case == "UMT5",
    )  # fmt: skip
    assert tower.projection_shape is None
    shapes = {name: tuple(tower.read(name).shape) for name in tower.spec.tensors()}
    assert shapes == tower.spec.tensors()


def test_names_are_those_of_the_file(tmp_path: Path) -> None:
    """Canonical names and values are what `save_pretrained` writes, so the keys are the file's."""
    module = model("UMT5")
    module.save_pretrained(tmp_path)
    file = load_file(tmp_path / "model.safetensors")
    tower = tower_of(module)
    assert isinstance(tower, Tower)
    assert {n: tower.read(n).shape for n in tower.spec.tensors()} == {
        n: t.shape for n, t in file.items() if n != "encoder.embed_tokens.weight"
    }
    assert all(torch.equal(tower.read(n), file[n]) for n in tower.spec.tensors())


# One model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", KINDS)
def test_outputs(case: str, dtype: str, accelerate: Accelerate) -> None:
    module = model(case, dtype)
    assert accelerate(module) is module
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((IDS,), {}),
        ((IDS[:1, :1],), {"output_hidden_states": False}),
        ((IDS.int(),), {"return_dict": False, "output_attentions": False}),
        ((), {"input_ids": IDS, "attention_mask": MASK}),
        ((IDS, MASK), {"return_dict": True}),  # as Wan calls
        ((IDS, MASK.bool()), {"return_dict": False}),
        ((IDS, MASK.float()), {"inputs_embeds": None}),
        ((IDS, torch.ones_like(MASK)), {}),
        ((IDS.repeat(5, 10), None), {"output_hidden_states": None}),
    ]
    for n, (args, kwargs) in enumerate(calls):
        got, expected = call(module, *args, **kwargs), eager(module, *args, **kwargs)
        assert served(module) == n + 1, (args, kwargs, octavo.report(module)[name_of(module)])
        assert type(got) is type(expected)
        if isinstance(expected, tuple):
            assert_close(expected, got)
            continue
        assert list(got) == list(expected) == ["last_hidden_state"]
        assert_close(expected.to_tuple(), got.to_tuple())
    assert_close(*(f(module, IDS, MASK).last_hidden_state for f in (eager, call)), 0.99, 0.98)
    masked, unmasked = (call(module, IDS, m).last_hidden_state[0] for m in (MASK, None))
    assert float((masked - unmasked).abs().max()) > 0.05  # the mask is no decoration
    found = octavo.report(module)[name_of(module)]
    assert (found.engine, found.family) == ("torch_fp8", "t5")


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_masked_as_a_whole(dtype: str, accelerate: Accelerate) -> None:
    """Mochi's empty prompt. In fp16 transformers' versions differ, so it stays its own."""
    module = accelerate(model("T5", dtype))
    mask = MASK.clone()
    mask[1] = 0
    got, expected = (f(module, IDS, mask).last_hidden_state for f in (call, eager))
    assert got.isfinite().all()
    assert_close(expected, got)
    assert served(module) == ("16" not in dtype or dtype.startswith("b"))
    if not served(module):
        assert_same(expected, got)
        assert "leaves nothing of a row" in octavo.report(module)[name_of(module)].text()


def test_as_from_pretrained_loads_it(accelerate: Accelerate, tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    for dtype in (torch.float16, torch.bfloat16):
        module = transformers.T5EncoderModel.from_pretrained(tmp_path, torch_dtype=dtype)
        accelerate(module)
        assert_close(eager(module, IDS).last_hidden_state, last(module))
        assert last(module).dtype == dtype
        assert served(module) == 2
    assert "float32" in {
        str(p.dtype).removeprefix("torch.") for p in as_loaded(model()).parameters()
    }


NOT_OURS: dict[str, tuple[str, Callable[[nn.Module], Any]]] = {
    "hidden states": ("hidden states", lambda m: call(m, IDS, output_hidden_states=True)),
    "attentions": ("attentions", lambda m: call(m, IDS, output_attentions=True)),
    "embeddings": (
        "'inputs_embeds'|no plain",
        lambda m: call(m, inputs_embeds=m.encoder.embed_tokens(IDS)),
    ),
    "long": ("", lambda m: call(m, IDS.repeat(1, 129)[:, :1025])),
    "mask values": ("other values", lambda m: call(m, IDS, MASK * 2)),
    "other argument": ("'use_cache'", lambda m: call(m, IDS, MASK, use_cache=False)),
}


@pytest.mark.parametrize("case", NOT_OURS)
def test_pytorch_answers(case: str, accelerate: Accelerate) -> None:
    reason, ask = NOT_OURS[case]
    module = accelerate(model())
    last(module)
    try:
        with plain(module):
            expected = ask(module)
    except TypeError as error:  # an argument that this version does not know
        with pytest.raises(TypeError, match=str(error).partition("(")[0]):
            ask(module)
        return
    got = ask(module)
    assert list(got) == list(expected)
    for key in got:
        assert_same(expected[key], got[key])
    assert served(module) == 1
    found = octavo.report(module)[name_of(module)]
    assert not reason or any(part in found.text() for part in reason.split("|"))
    last(module)
    assert served(module) == 2


def test_head_masks(accelerate: Accelerate) -> None:
    module = accelerate(model())
    mask = torch.ones(2, 4)
    mask[0, 1] = 0
    with plain(module):
        try:
            expected = call(module, IDS, head_mask=mask).last_hidden_state
        except TypeError:
            expected = None
    if expected is not None:
        assert_same(expected, call(module, IDS, head_mask=mask).last_hidden_state)
    assert served(module) == 0
    call(module, IDS, head_mask=None)
    assert served(module) == 1


@pytest.mark.parametrize("inner", [False, True], ids=["config", "encoder's config"])
def test_configs_that_ask_for_more(inner: bool, accelerate: Accelerate) -> None:
    module = accelerate(model("UMT5"))
    config = module.encoder.config if inner else module.config
    config.output_hidden_states = True
    got, expected = call(module, IDS), eager(module, IDS)
    assert list(got) == list(expected)
    assert_same(expected.last_hidden_state, got.last_hidden_state)
    assert served(module) == 0


def test_gradients_and_training(accelerate: Accelerate) -> None:
    module = accelerate(model())
    module(IDS)
    assert served(module) == 0
    module.requires_grad_(False)
    module(IDS)
    assert served(module) == 1
    module.encoder.block[1].layer[0].dropout.train()  # one part is enough to drop values out
    with plain(module):
        torch.manual_seed(3)
        expected = call(module, IDS).last_hidden_state
    torch.manual_seed(3)
    assert_same(expected, last(module))
    assert served(module) == 1
    module.eval()
    last(module)
    assert served(module) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"input_ids": IDS, "inputs_embeds": torch.zeros(2, 8, 32)},
        {"input_ids": torch.full((1, 4), 256)},
        {"input_ids": torch.zeros(1, 4)},
    ],
)
def test_errors_are_the_models_own(arguments: dict[str, Any], accelerate: Accelerate) -> None:
    module = accelerate(model())
    with pytest.raises(Exception) as expected:
        eager(module, **arguments)
    with pytest.raises(type(expected.value)) as got:
        call(module, **arguments)
    assert str(got.value) == str(expected.value)


def test_decoders_and_whole_models_are_not_touched(accelerate: Accelerate) -> None:
    whole = transformers.T5ForConditionalGeneration(model().config)
    with pytest.raises(OctavoError, match="T5ForConditionalGeneration is no text encoder"):
        accelerate(whole)
    with pytest.raises(OctavoError, match="T5Stack is no text encoder"):
        accelerate(model().encoder)


# Pipelines


@pytest.mark.parametrize("name", t5_pipelines.PIPELINES)
def test_pipeline(name: str, accelerate: Accelerate) -> None:
    make, options = t5_pipelines.PIPELINES[name]
    pipe = make()
    ask: Callable[..., list[Tensor]] = t5_pipelines.embeddings
    before = ask(pipe, "a photo of a cat", **options)
    assert accelerate(pipe) is pipe
    got = ask(pipe, "a photo of a cat", **options)
    assert len(got) == 2 and served(pipe.text_encoder) == 2
    assert_close(before, got)
    both = ["a cat", "the quick brown fox"]
    together = ask(pipe, both, **options)
    with plain(pipe.text_encoder):
        want = ask(pipe, both, **options)
    assert_close(want, together)
    assert host._served(pipe.text_encoder).reasons.total() == 0
    assert octavo.report(pipe)["text_encoder"].engine == "torch_fp8"
    octavo.restore(pipe)
    assert_same(before, ask(pipe, "a photo of a cat", **options))


def test_flux_by_components(accelerate: Accelerate) -> None:
    pipe = accelerate(tiny.flux(), components="text_encoder_2")
    assert_close(expected_embeddings(pipe), embeddings(pipe))
    assert (served(pipe.text_encoder), served(pipe.text_encoder_2)) == (0, 1)
    found = octavo.report(pipe)
    assert found["text_encoder_2"].family == "t5" and found["text_encoder_2"].engine == "torch_fp8"
    assert "not accelerated" in found["text_encoder"].text()


def test_calibration_prompts(accelerate: Accelerate) -> None:
    pipe = tiny.flux()
    accelerate(pipe, calibration_prompts=["the fox", "the quick brown fox jumps over the dog"])
    assert_close(expected_embeddings(pipe), embeddings(pipe))
    rows = host._served(pipe.text_encoder_2).options.tokens
    assert len({len(row) for row in rows}) == 1 < len(rows) and len(rows[0]) < 77
    assert {len(row) for row in host._served(pipe.text_encoder).options.tokens} == {77}
    assert all(served(m) for m in encoders(pipe))


# Weights that change


def query(module: Any) -> None:
    module.encoder.block[1].layer[0].SelfAttention.q.weight.data.mul_(-1)


def bias(module: Any) -> None:
    with torch.no_grad():
        attention = module.encoder.block[0].layer[0].SelfAttention
        attention.relative_attention_bias.weight.mul_(-40)


def norm(module: Any) -> None:
    module.encoder.block[1].layer[1].layer_norm.weight.data.mul_(3)


def wo(module: Any) -> None:
    module.encoder.block[1].layer[1].DenseReluDense.wo.weight.data.neg_()


def tokens(module: Any) -> None:
    module.get_input_embeddings().weight.data.mul_(torch.linspace(-1, 1, 32))


def other_order(module: Any) -> None:
    for block in module.encoder.block:
        reorder(block.layer[1].DenseReluDense.wo.weight)
        reorder(block.layer[0].SelfAttention.v.weight)


def wo_cast(module: Any) -> None:
    for name, part in module.named_modules():
        if name.endswith(".wo"):
            part.weight.data = part.weight.data.neg().to(torch.float16)


@pytest.mark.parametrize("change", [query, bias, norm, wo, other_order, tokens])
@pytest.mark.parametrize("dtype", ["float32", FP16_AS_LOADED])
def test_changed_in_place(
    change: Callable[[Any], None], dtype: str, accelerate: Accelerate
) -> None:
    module = accelerate(model("T5", dtype), floor=NARROW)
    before, saved = last(module), copy.deepcopy(module.state_dict())
    change(module)
    got = last(module)
    assert_close(eager(module, IDS).last_hidden_state, got, 0.98, 0.93)
    assert float((before - got).abs().max()) > 0.05
    module.load_state_dict(saved)
    assert_same(before, last(module))
    assert served(module) == 3


def test_wo_is_cast_later(accelerate: Accelerate) -> None:
    module = accelerate(model("T5", FP16_AS_LOADED), floor=NARROW)
    before = last(module)
    wo_cast(module)
    got = last(module)
    assert_close(eager(module, IDS).last_hidden_state, got, 0.98, 0.93)
    assert float((before - got).abs().max()) > 0.05
    assert served(module) == 2


def test_tokens_are_looked_up_where_the_model_does(accelerate: Accelerate) -> None:
    module = accelerate(model())
    before = last(module)
    other = nn.Embedding.from_pretrained(torch.randn(256, 32) * 2)
    module.set_input_embeddings(other)
    assert_close(eager(module, IDS).last_hidden_state, last(module))
    assert float((before - last(module)).abs().max()) > 0.05
    module.shared = nn.Embedding(256, 32)  # nothing reads it
    assert_close(eager(module, IDS).last_hidden_state, last(module))
    assert served(module) == 4


def test_added_tokens_leave_the_checkpoint_alone(accelerate: Accelerate) -> None:
    """T5's vocabulary is its first 32128 rows, wherever else the table ends."""
    module = accelerate(model(vocabulary=32128))
    first = last(module)
    key = octavo.report(module)[name_of(module)].checkpoint
    module.resize_token_embeddings(32130)
    assert_same(first, last(module))
    ids = IDS.clone()
    ids[0, 2] = 32129
    assert_close(eager(module, ids).last_hidden_state, last(module, ids))
    assert octavo.report(module)[name_of(module)].checkpoint == key
    assert served(module) == 3


@pytest.mark.parametrize("dtype", ["float32", FP16_AS_LOADED])
def test_lora(dtype: str, accelerate: Accelerate) -> None:
    module = accelerate(model("T5", dtype), floor=NARROW)
    base = last(module)
    config = LoraConfig(
        r=4, lora_alpha=4, target_modules=["q", "v", "o", "wi_1", "wo"], init_lora_weights=False
    )
    originals = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear)}
    torch.manual_seed(1)
    inject_adapter_in_model(config, module, "a")
    module.eval()
    for name, p in module.named_parameters():
        if "lora_" in name:
            p.data.mul_(0.5)
    layers = [m for m in module.modules() if isinstance(m, BaseTunerLayer)]
    assert len(layers) == 10

    def check(differs: bool = True) -> Tensor:
        before, got = served(module), last(module)
        assert_close(eager(module, IDS).last_hidden_state, got, 0.98, 0.9)
        assert served(module) == before + 1
        assert (float((got - base).abs().max()) > 0.05) is differs
        return got

    adapted = check()
    for one in layers:
        one.set_scale("a", 0.5)
    check()
    for one in layers:
        one.set_scale("a", 1.0)
    assert_same(adapted, last(module))
    for one in layers:
        one.enable_adapters(False)
    assert_same(base, check(False))
    for one in layers:
        one.enable_adapters(True)
        one.merge()
    check()
    for one in layers:
        one.unmerge()
    for name, linear in originals.items():
        parent, _, key = name.rpartition(".")
        setattr(module.get_submodule(parent), key, linear)
    assert not any(isinstance(m, BaseTunerLayer) for m in module.modules())
    assert_close(base, last(module))
    octavo.restore(module)


# What is left to PyTorch


class Linear4bit(nn.Linear):
    """bitsandbytes' way: a class of its own."""


def a_class_of_its_own(module: Any) -> None:
    module.encoder.block[0].layer[1].DenseReluDense.wo = Linear4bit(128, 32, bias=False)


def fp8_weights(module: Any) -> None:
    """diffusers' layerwise casting, and what loads an FP8 file as it is."""
    wi = module.encoder.block[0].layer[1].DenseReluDense.wi_0
    wi.weight = nn.Parameter(wi.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)


def biased(module: Any) -> None:
    module.encoder.block[1].layer[0].SelfAttention.q.bias = nn.Parameter(torch.ones(32))


def apex(module: Any) -> None:
    module.encoder.block[1].layer[0].layer_norm = nn.LayerNorm(32)


def hooked(module: Any) -> None:
    module.encoder.block[1].register_forward_hook(lambda *_: None)


def patched(module: Any) -> None:
    attention = module.encoder.block[0].layer[0].SelfAttention
    original = attention.forward
    attention.forward = lambda *a, **k: original(*a, **k)


def scaled_attention(module: Any) -> None:
    for block in module.encoder.block:
        block.layer[0].SelfAttention.scaling = 0.5


LEFT: dict[str, tuple[str, Callable[[Any], object]]] = {
    "class": ("Linear4bit", a_class_of_its_own),
    "fp8": ("float8_e4m3fn", fp8_weights),
    "bias": ("q has a bias", biased),
    "norm": ("variance_epsilon", apex),
    "hook": ("a hook of", hooked),
    "forward": ("forward of .* is replaced", patched),
    "meta": ("meta device", lambda m: m.encoder.block[1].to("meta")),
    "norm in another dtype": ("several dtypes", lambda m: m.encoder.final_layer_norm.half()),
    "a wider matrix": ("several dtypes", lambda m: m.half().encoder.block[0].layer[0].float()),
    "activation": (
        "activation is SiLU",
        lambda m: [setattr(b.layer[1].DenseReluDense, "act", nn.SiLU()) for b in m.encoder.block],
    ),
    "no relative bias": (
        "attention is not T5's",
        lambda m: setattr(
            m.encoder.block[0].layer[0].SelfAttention, "has_relative_attention_bias", False
        ),
    ),
    "compile": ("compiled", lambda m: m.compile(backend="eager")),
}


@pytest.mark.parametrize("case", LEFT)
def test_left_to_pytorch(
    case: str, accelerate: Accelerate, caplog: pytest.LogCaptureFixture
) -> None:
    reason, change = LEFT[case]
    pipe = tiny.flux()
    change(pipe.text_encoder_2)
    accelerate(pipe)
    assert "text_encoder_2: PyTorch keeps serving it" in caplog.text
    with pytest.raises(OctavoError, match=f"text_encoder_2 cannot be accelerated: .*{reason}"):
        accelerate(pipe, components="text_encoder_2")
    assert octavo.report(pipe)["text_encoder_2"].engine == "host"
    call(pipe.text_encoder, torch.full((1, 77), 49407))
    assert (served(pipe.text_encoder), served(pipe.text_encoder_2)) == (1, 0)


@pytest.mark.parametrize("change", [hooked, patched, biased, fp8_weights, scaled_attention])
def test_changed_after_the_first_prompt(
    change: Callable[[Any], None], accelerate: Accelerate
) -> None:
    module = accelerate(model())
    last(module)
    change(module)
    if change is not fp8_weights:  # which no nn.Linear can multiply with
        assert_same(eager(module, IDS).last_hidden_state, last(module))
    assert served(module) == 1
    assert isinstance(tower_of(module), str)


# Places, copies, files


@pytest.mark.parametrize("kind", OFFLOADS)
@pytest.mark.parametrize("first", [True, False], ids=["offload first", "accelerate first"])
def test_offload(kind: str, first: bool, accelerate: Accelerate) -> None:
    pipe = tiny.flux()
    before, picture = embeddings(pipe), tiny.picture(pipe)
    weights = bits(pipe)
    for step in (OFFLOADS[kind], accelerate) if first else (accelerate, OFFLOADS[kind]):
        step(pipe)
    for _ in range(2):
        reached = [served(m) for m in encoders(pipe)]
        assert abs(tiny.picture(pipe) - picture).max() < 0.05
        assert all(served(m) > n for m, n in zip(encoders(pipe), reached, strict=True))
    assert_close(before, embeddings(pipe))
    assert all(host._served(m).reasons.total() == 0 for m in encoders(pipe))
    assert_same(before, expected_embeddings(pipe))  # PyTorch under the hooks, too
    octavo.restore(pipe)
    assert (tiny.picture(pipe) == picture).all()
    assert_same(before, embeddings(pipe))
    if "group" not in kind:
        without_hooks(pipe)
        assert_bits(weights, bits(pipe))


@pytest.mark.parametrize("offloaded", [True, False])
def test_under_model_offload_the_engine_goes_as_the_model_does(
    offloaded: bool, accelerate: Accelerate
) -> None:
    module = model()
    accelerate(module)
    if offloaded:
        hook = hf_accelerate.hooks.CpuOffload(execution_device=torch.device("cpu"))
        hf_accelerate.hooks.add_hook_to_module(module, hook)
    with torch.no_grad():
        first = module(IDS, attention_mask=MASK).last_hidden_state
        encoder = host._served(module)._encoder
        assert (encoder.vram_bytes == 0) == offloaded and encoder.has_engine
        assert torch.equal(module(IDS, attention_mask=MASK).last_hidden_state, first)
    assert served(module) == 2


def test_one_token_table_with_two_hooks(accelerate: Accelerate) -> None:
    """`shared` is the very module that is looked up in, as up to transformers 4."""
    module = model()
    before = last(module)
    module.shared = module.encoder.embed_tokens
    hf_accelerate.cpu_offload(module, torch.device("cpu"))
    assert module.shared.weight.is_meta
    accelerate(module)
    assert_close(before, last(module))
    assert served(module) == 1


@pytest.mark.parametrize("kind", OFFLOADS)
def test_parked_then_offloaded(kind: str, accelerate: Accelerate) -> None:
    pipe = tiny.flux()
    module = pipe.text_encoder_2
    before = embeddings(pipe)
    accelerate(pipe)
    parking.park(parkable(module), torch.device("cpu"))
    OFFLOADS[kind](pipe)
    assert_close(before, embeddings(pipe))
    assert served(module) == 1
    assert_same(before, expected_embeddings(pipe))
    assert not any(map(parking.is_parked, parkable(module)))
    assert_close(before, embeddings(pipe))
    assert served(module) == 2


def test_parked_blocks_come_home() -> None:
    """Host memory and device are one on a CPU; tests/gpu has the real thing."""
    module = model()
    before = last(module)
    weights = {n: t.clone() for n, t in module.state_dict().items()}
    parts = parkable(module)
    table = module.get_input_embeddings().weight
    assert len(parts) == 3
    assert not any(p is table for part in parts for p in part.parameters())
    assert sum(p.numel() for part in parts for p in part.parameters()) + table.numel() == sum(
        p.numel() for p in module.parameters()
    )
    parking.park(parts, torch.device("cpu"))
    assert all(map(parking.is_parked, parts))
    assert isinstance(tower_of(module), Tower)
    for one in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert all(map(parking.is_parked, parkable(one)))
        assert_same(before, last(one))
        assert not any(map(parking.is_parked, parkable(one)))
    assert all(torch.equal(weights[n], t) for n, t in module.state_dict().items())


@pytest.mark.parametrize("offload", [None, model_offload, sequential_offload])
def test_saved_and_copied(offload: Any, accelerate: Accelerate, tmp_path: Path) -> None:
    pipe = tiny.flux()
    pipe.text_encoder_2.save_pretrained(tmp_path / "before")
    keys = list(pipe.text_encoder_2.state_dict())
    accelerate(pipe)
    got = embeddings(pipe)
    parking.park(parkable(pipe.text_encoder_2), torch.device("cpu"))
    pipe.text_encoder_2.save_pretrained(tmp_path / "after")
    for name in ("model.safetensors", "config.json"):
        one, other = ((tmp_path / folder / name).read_bytes() for folder in ("before", "after"))
        assert one == other
    assert keys == list(pipe.text_encoder_2.state_dict())
    if offload is not None:
        offload(pipe)
    twin = copy.deepcopy(pipe.text_encoder_2)
    reached = served(pipe.text_encoder_2)
    assert_same(eager(pipe.text_encoder_2, IDS).last_hidden_state, last(twin))
    assert served(twin) == 0 and served(pipe.text_encoder_2) == reached
    with torch.no_grad():
        for p in copy.deepcopy(pipe.text_encoder_2).parameters():
            if not p.is_meta:
                p.mul_(1.1)
    assert_same(got, embeddings(pipe))
    octavo.restore(pipe)
    assert "Forward" not in str({k: type(v) for k, v in vars(pipe.text_encoder_2).items()})


def test_moves(accelerate: Accelerate) -> None:
    pipe = accelerate(tiny.flux())
    first = embeddings(pipe)
    pipe.to(torch.bfloat16)
    got = embeddings(pipe)
    assert all(t.dtype == torch.bfloat16 for t in got if t.dim() == 3)
    assert_close(expected_embeddings(pipe), got)
    pipe.to(torch.float32)
    assert_close(first, embeddings(pipe))
    assert all(host._served(m).reasons.total() == 0 for m in encoders(pipe))
