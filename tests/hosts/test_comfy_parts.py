# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Noticing what changed an encoder past ComfyUI's patcher; this needs no ComfyUI."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from octavo.hosts.comfy_parts import Parts
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.fc(x))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Guard:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.fixture
def encoder() -> Encoder:
    return Encoder()


def parts_of(encoder: Encoder) -> Parts:
    return Parts(encoder, encoder.inner, Guard)


def test_what_is_ours_or_as_it_was_is_no_change(encoder: Encoder) -> None:
    parts = parts_of(encoder)
    assert parts.changed() == ""
    encoder.__dict__["forward"] = Guard()  # the seam: of the encoder itself nothing is asked
    encoder.inner.__dict__["forward"] = Guard()
    block = encoder.inner.layers[0]
    block.__dict__["forward"] = block.forward  # as a bypass LoRA leaves it
    with torch.no_grad():
        block.fc.weight.mul_(2)  # a patch
    block.fc.weight = nn.Parameter(torch.zeros(4, 4))
    encoder.to(torch.float16)
    assert parts.changed() == ""


def layer(encoder: Encoder) -> None:
    encoder.inner.layers[1] = Block()


def fewer(encoder: Encoder) -> None:
    encoder.inner.layers = encoder.inner.layers[:1]


def removed(encoder: Encoder) -> None:
    del encoder.inner.layers[1]


def added(encoder: Encoder) -> None:
    encoder.inner.layers.append(Block())


def within(encoder: Encoder) -> None:
    encoder.inner.layers[0].fc = nn.Linear(4, 4)


def forward(encoder: Encoder) -> None:
    encoder.inner.layers[0].fc.forward = lambda x: x


def borrowed(encoder: Encoder) -> None:
    encoder.inner.layers[0].fc.forward = encoder.inner.layers[1].fc.forward


def guarded(encoder: Encoder) -> None:
    encoder.inner.forward = lambda x: x


def hook(encoder: Encoder) -> None:
    encoder.inner.layers[0].register_forward_hook(lambda *_: None)


def pre_hook(encoder: Encoder) -> None:
    encoder.inner.layers[0].norm.register_forward_pre_hook(lambda *_: None)


CHANGES = [layer, fewer, removed, added, within, forward, borrowed, guarded, hook, pre_hook]


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(encoder: Encoder, change: Callable[[Encoder], None]) -> None:
    parts = parts_of(encoder)
    change(encoder)
    assert parts.changed().startswith("another node ")


def test_a_forward_that_is_replaced_for_a_whole_class(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, own = parts_of(encoder), Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x: own(self, x))
    assert parts.changed() == "the forward of every Block is replaced"
    monkeypatch.undo()
    assert parts.changed() == ""

    def elsewhere(self: Block, x: torch.Tensor) -> torch.Tensor:
        return x

    elsewhere.__module__ = "somebody.elses"  # and before the encoder came
    monkeypatch.setattr(Block, "forward", elsewhere)
    assert parts_of(encoder).changed() == "the forward of every Block is replaced"
