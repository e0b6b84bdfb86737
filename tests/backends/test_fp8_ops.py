# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Quantization bit by bit, the weights of a checkpoint, and the simulated FP8 arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from fp8_weights import checkpoint_tensors, random_embeds, tiny, tiny_weights
from octavo.backends.fp8_ops import (
    E4M3,
    DeviceWeights,
    Fp8Linear,
    Fp8Ops,
    Fp8Weights,
    HalfLinear,
    dequantize,
    quantize_input,
    quantize_weight,
    quantize_weights,
)
from octavo.backends.torch_ops import causal_attention
from octavo.checkpoints.quantized import scale_from_amax, to_fp8
from octavo.encoders import Ops, encode
from octavo.encoders.clip import POSITIONS
from octavo.errors import OctavoBug, QuantizationError
from octavo.seeded import TINY
from torch import Tensor

CPU = torch.device("cpu")
TINY_GELU = replace(TINY, activation="gelu")
QKV = tuple(TINY.block(0) + f"self_attn.{n}_proj" for n in "qkv")
OUT = TINY.block(1) + "self_attn.out_proj"


def every_half() -> Tensor:
    """Every finite fp16 value, both zeros included."""
    values = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    return values[values.isfinite()]


def nearest_code(values: Tensor) -> Tensor:
    """FP32 -> E4M3 codes by searching all of them: the nearest, of two the even one, saturated."""
    codes = torch.arange(127, dtype=torch.uint8)  # 0 to 448; 127 is NaN
    table = codes.view(E4M3).double()
    size = values.double().abs().clamp(max=448.0)
    above = torch.searchsorted(table, size).clamp(max=126)
    below = (above - 1).clamp(min=0)
    up, down = table[above] - size, size - table[below]
    chosen = torch.where((up < down) | ((up == down) & (codes[above] % 2 == 0)), above, below)
    chosen = torch.where(table[above] == size, above, chosen).to(torch.uint8)
    return chosen | (values.signbit().to(torch.uint8) << 7)


class TestQuantization:
    @pytest.mark.parametrize("scale", [1.0, 2.0**-6, 0.0123, 7.0 / 448, 65504 / 448, 3e-5])
    def test_every_half_becomes_the_nearest_code(self, scale: float) -> None:
        x, s = every_half(), torch.tensor(scale)
        codes = quantize_input(x, s)
        assert codes.dtype == E4M3
        assert torch.equal(codes.view(torch.uint8), nearest_code(x.float() / s))

    def test_special_values(self) -> None:
        inf, tiny_ = float("inf"), 2.0**-9  # the smallest subnormal code
        x = torch.tensor(
            [0.0, -0.0, 448.0, 449.0, 1e9, inf, -inf, tiny_, tiny_ / 2, tiny_ * 0.51, -tiny_ * 1.5]
        )
        codes = quantize_input(x, torch.ones(())).view(torch.uint8).tolist()
        assert codes == [0, 0x80, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 1, 0, 1, 0x82]
        assert quantize_input(torch.tensor([float("nan")]), torch.ones(())).float().isnan().all()

    def test_divides_in_fp32_whatever_the_input_dtype(self) -> None:
        x = every_half()
        scale = torch.tensor(0.0371)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            y = x.to(dtype)
            expected = quantize_input(y.float(), scale)
            assert torch.equal(
                quantize_input(y, scale).view(torch.uint8), expected.view(torch.uint8)
            )

    def test_weights_round_as_the_checkpoint_was_written(self) -> None:
        weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(3)).half()
        codes, scale = quantize_weight(weight)
        assert torch.equal(scale, scale_from_amax(weight.abs().amax(), "weight"))
        assert torch.equal(codes.view(torch.uint8), to_fp8(weight, scale).view(torch.uint8))
        assert codes.float().abs().max() == 448
        assert (dequantize(codes, scale) - weight.float()).abs().max() <= scale * 16

    def test_many_weights_as_one_by_one(self) -> None:
        random = torch.Generator().manual_seed(4)
        many = {str(i): torch.randn(8 + i, 16, generator=random).to(d) for i, d in
                enumerate((torch.float16, torch.bfloat16, torch.float32))}  # fmt: skip
        for name, (codes, scale) in quantize_weights(many).items():
            alone = quantize_weight(many[name])
            assert torch.equal(codes.view(torch.uint8), alone[0].view(torch.uint8))
            assert torch.equal(scale, alone[1])
        assert quantize_weights({}) == {}

    @pytest.mark.parametrize("value", [0.0, 1e-45])  # amax / 448 underflows to zero for the second
    def test_zero_scale_becomes_one(self, value: float) -> None:
        codes, scale = quantize_weight(torch.full((4, 4), value))
        assert scale == 1.0
        assert (codes.float() == 0).all()

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_not_finite_is_refused_by_name(self, value: float) -> None:
        bad = torch.zeros(4, 4)
        bad[1, 2] = value
        with pytest.raises(QuantizationError, match=r"b\.weight"):
            quantize_weights({"a.weight": torch.ones(2, 2), "b.weight": bad})


class TestWeights:
    def test_kinds_follow_the_tensors(self) -> None:
        kinds = {type(v) for v in tiny_weights("fp8").linears.values()}
        assert kinds == {Fp8Linear}
        mixed = tiny_weights("fp8-mixed").linears
        assert {n.rsplit(".", 1)[1] for n, v in mixed.items() if isinstance(v, HalfLinear)} == {
            "out_proj"
        }
        bf16 = tiny_weights("bf16")
        assert {type(v) for v in bf16.linears.values()} == {HalfLinear}
        assert (
            bf16.body
            == torch.bfloat16
            == bf16.tables[POSITIONS].dtype
            == bf16.linears[OUT].bias.dtype
        )

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            (OUT + ".input_scale", None, "is missing"),
            (OUT + ".weight_scale", torch.tensor(0.0), "is 0.0"),
            (OUT + ".input_scale", torch.tensor(-1.0), "is -1.0"),
            (OUT + ".input_scale", torch.tensor(1e-40), "normal"),
            (OUT + ".weight_scale", torch.tensor(float("nan")), "is nan"),
            (OUT + ".weight_scale", torch.ones(3), "has 3 values"),
            (OUT + ".weight", torch.zeros(2, 2).to(E4M3), "has shape"),
            (OUT + ".bias", torch.full((TINY.width,), 1e6), "infinite"),
            (TINY.block(0) + "layer_norm1.weight", None, "is missing"),
        ],
    )
    def test_bad_tensors_are_refused_by_name(
        self, name: str, value: Tensor | None, message: str
    ) -> None:
        tensors = checkpoint_tensors(TINY, tiny(), count=1)
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
        with pytest.raises(QuantizationError, match=message) as caught:
            Fp8Weights.from_tensors(TINY, tensors)
        assert name in str(caught.value)

    def test_stacking_never_requantizes(self) -> None:
        weights = tiny_weights()
        stack = DeviceWeights(weights, CPU).matrices[QKV]
        for name, rows, scale in zip(QKV, stack.parts(), stack.weight_scales, strict=True):
            linear = weights.linears[name]
            assert torch.equal(
                stack.weight[rows].view(torch.uint8), linear.weight.view(torch.uint8)
            )
            assert torch.equal(scale, linear.weight_scale)
            assert (stack.column_scale[rows] == linear.weight_scale * linear.input_scale).all()
        assert len({weights.linears[n].weight_scale.item() for n in QKV}) == 3

    def test_other_input_scales_run_apart(self) -> None:
        weights = with_input_scale(tiny_weights(), QKV[1], 2.0)
        matrices = DeviceWeights(weights, CPU).matrices
        assert QKV not in matrices
        assert {(n,) for n in QKV} <= matrices.keys()

    def test_size_counts_every_byte(self) -> None:
        d, f, layers = TINY.width, TINY.feed_forward, TINY.layers
        codes = layers * (4 * d * d + 2 * d * f)
        body = layers * (4 * d + f + d + 4 * d) + 2 * d + TINY.positions * d
        scales = layers * ((4 * d + f + d) + 6 + 4)  # per column, per linear, per matrix
        assert DeviceWeights(tiny_weights(), CPU).size_bytes == codes + 2 * body + 4 * scales

    def test_requantizing_the_same_values_changes_nothing(self) -> None:
        for recipe in ("fp8", "fp8-mixed", "bf16"):
            weights = tiny_weights(recipe)
            again = weights.requantized(tiny())
            assert again.linears.keys() == weights.linears.keys()
            for name, linear in weights.linears.items():
                for field in vars(linear):
                    old, new = getattr(linear, field), getattr(again.linears[name], field)
                    assert torch.equal(old.float(), new.float()), (name, field)

    def test_requantizing_refuses_what_is_not_finite(self) -> None:
        bad = dict(tiny())
        bad[OUT + ".weight"] = bad[OUT + ".weight"].clone().fill_(float("inf"))
        with pytest.raises(QuantizationError, match=r"out_proj\.weight"):
            tiny_weights().requantized(bad)

    def test_copying_another_structure_is_refused(self) -> None:
        loaded = DeviceWeights(tiny_weights(), CPU)
        others = [tiny_weights("fp8-mixed"), tiny_weights("bf16"), tiny_weights("fp8", TINY_GELU)]
        for other in (*others, with_input_scale(tiny_weights(), QKV[0], 2.0)):
            with pytest.raises(QuantizationError, match="structure"):
                loaded.copy_from(other)


def with_input_scale(weights: Fp8Weights, name: str, factor: float) -> Fp8Weights:
    linear = weights.linears[name]
    changed = replace(linear, input_scale=linear.input_scale * factor)
    return replace(weights, linears={**weights.linears, name: changed})


class Straightforward(Ops[Tensor]):
    """FP8 arithmetic with nothing fused, deferred or stacked: quantize, dequantize, multiply."""

    def __init__(self, weights: Fp8Weights) -> None:
        self.weights, self.body = weights, weights.body

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def add_positions(self, x: Tensor, name: str) -> Tensor:
        return x + self.weights.tables[POSITIONS][: x.shape[1]]

    def linear(self, x: Tensor, name: str) -> Tensor:
        linear = self.weights.linears[name]
        if isinstance(linear, HalfLinear):
            return F.linear(x, linear.weight, linear.bias)
        a = dequantize(to_fp8(x, linear.input_scale), linear.input_scale)
        w = dequantize(linear.weight, linear.weight_scale)
        return (a.double() @ w.double().T + linear.bias.double()).to(self.body)

    def layer_norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        weight, bias = self.weights.norms[name]
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, heads: int, mask: Tensor | None
    ) -> Tensor:
        return causal_attention(q, k, v, heads, mask)

    def quick_gelu(self, x: Tensor) -> Tensor:
        return (x.float() * torch.sigmoid(1.702 * x.float())).to(self.body)

    def gelu(self, x: Tensor) -> Tensor:
        return F.gelu(x.float()).to(self.body)


def run(ops: Ops, spec, embeds: Tensor, mask: Tensor | None = None) -> list[Tensor]:
    hidden, last = encode(ops, spec, embeds, mask)
    get = getattr(ops, "tensor", lambda value: value)
    return [get(state) for state in (*hidden, last)]


def assert_close(got: Sequence[Tensor], expected: Sequence[Tensor], mean: float = 0.9995) -> None:
    """One rounding that falls the other way moves a code by a step, so not bit by bit."""
    assert len(got) == len(expected)
    for mine, other in zip(got, expected, strict=True):
        assert mine.dtype == other.dtype and mine.shape == other.shape
        cosine = F.cosine_similarity(mine.double(), other.double(), dim=-1)
        assert cosine.mean() > mean, cosine.mean()


class TestArithmetic:
    @pytest.mark.parametrize("recipe", ["fp8", "fp8-mixed", "bf16"])
    @pytest.mark.parametrize("spec", [TINY, TINY_GELU], ids=lambda s: s.activation)
    def test_as_the_straightforward_arithmetic(self, recipe: str, spec) -> None:
        weights = tiny_weights(recipe, spec)
        embeds = random_embeds(spec, 2).to(weights.body)
        ops = Fp8Ops(DeviceWeights(weights, CPU), simulated=True)
        assert_close(run(ops, spec, embeds), run(Straightforward(weights), spec, embeds))

    @pytest.mark.parametrize("tokens", [1, 20, 77])
    def test_masked_and_short(self, tokens: int) -> None:
        weights = tiny_weights()
        embeds = random_embeds(TINY, 3)[:, :tokens].half()
        mask = torch.arange(tokens) < torch.tensor([[tokens], [max(1, tokens // 2)], [1]])
        ops = Fp8Ops(DeviceWeights(weights, CPU), simulated=True)
        expected = run(Straightforward(weights), TINY, embeds, mask)
        assert_close(run(ops, TINY, embeds, mask), expected)

    def test_apart_is_what_stacked_is(self) -> None:
        """Three GEMMs with three input scales: each by its own, none requantized to another's."""
        weights = with_input_scale(tiny_weights(), QKV[1], 1.7)
        embeds = random_embeds(TINY, 2).half()
        ops = Fp8Ops(DeviceWeights(weights, CPU), simulated=True)
        assert_close(run(ops, TINY, embeds), run(Straightforward(weights), TINY, embeds))

    def test_one_of_a_stack_asked_for_alone(self) -> None:
        ops = Fp8Ops(DeviceWeights(tiny_weights(), CPU), simulated=True)
        x = random_embeds(TINY, 1).half() * 50
        together = ops.linears(x, QKV)
        for name, expected in zip(QKV, together, strict=True):
            assert torch.equal(ops.tensor(ops.linear(x, name)), ops.tensor(expected))

    def test_deferred_values_as_tensors(self) -> None:
        """What no encoder asks for yet: every deferred value is also a plain tensor."""
        weights = tiny_weights()
        ops, plain = Fp8Ops(DeviceWeights(weights, CPU), simulated=True), Straightforward(weights)
        x = random_embeds(TINY, 1).half() * 50
        fc1, block = TINY.block(0) + "mlp.fc1", TINY.block(0)
        pairs = [(o.gelu(o.linear(x, fc1)), o.quick_gelu(o.linear(x, fc1)),
                  o.layer_norm(x, block + "layer_norm1", 1e-5),
                  o.attention(x, x, x, heads=2, mask=None), o.add(x, x),
                  o.add(x, o.linear(x, OUT))) for o in (ops, plain)]  # fmt: skip
        for mine, other in zip(*pairs, strict=True):
            assert_close([ops.tensor(mine)], [other])

    def test_states_go_to_their_places(self) -> None:
        from octavo.encoders.clip import FINAL_NORM

        weights = DeviceWeights(tiny_weights(), CPU)
        embeds = random_embeds(TINY, 2).half()
        expected = run(Fp8Ops(weights, simulated=True), TINY, embeds)
        out = torch.full((4, *embeds.shape), float("nan"), dtype=torch.float16)
        names = [POSITIONS, *(TINY.block(i) + "mlp.fc2" for i in range(2)), FINAL_NORM]
        places = dict(zip(names, out, strict=True))
        states = run(Fp8Ops(weights, simulated=True, places=places), TINY, embeds)
        for i, state in enumerate(states):
            assert state.data_ptr() == out[i].data_ptr()
            assert torch.equal(state, expected[i])

    def test_misuse_is_a_bug(self) -> None:
        ops = Fp8Ops(DeviceWeights(tiny_weights(), CPU), simulated=True)
        x = random_embeds(TINY, 1).half()
        with pytest.raises(OctavoBug, match="activation"):
            ops.gelu(x)
        with pytest.raises(OctavoBug, match="other_table"):
            ops.add_positions(x, "other_table")
