# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""A real plan of the real TensorRT for RTX on a GPU it does not support: words, not a crash."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from octavo.accelerated import AcceleratedEncoder
from octavo.backends.onnx_ops import emit
from octavo.bench import LiveHost
from octavo.device import Device
from octavo.engine_cache import EngineCache
from octavo.errors import EngineUnavailable
from octavo.seeded import TINY, seeded_tensors
from octavo.trt import load
from octavo.trt import session as session_module
from octavo.trt.build import BuildRequest, build_plan
from octavo.trt.session import Place, session_from_plan

pytestmark = pytest.mark.gpu
SUPPORTED = (75, 80, 86, 89, 120, 121)  # TensorRT for RTX 1.7


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor in SUPPORTED:
        pytest.skip("TensorRT for RTX supports this GPU")
    graph = emit(TINY, dict.fromkeys(TINY.linears(), "fp8"))
    shapes = tuple((batch, TINY.positions, TINY.width) for batch in (1, 2, 16))
    request = BuildRequest("tensorrt_rtx", graph.model, (89, 120), {"embeds": shapes})  # type: ignore[dict-item]
    return build_plan(request, target=tmp_path_factory.mktemp("plan") / "tiny.plan").path


def refusal(plan: Path, place: Place) -> str:
    graph = emit(TINY, dict.fromkeys(TINY.linears(), "fp8"))
    before = torch.cuda.memory_allocated()
    with pytest.raises(EngineUnavailable) as caught:
        session_from_plan(
            plan,
            module=load("tensorrt_rtx"),
            graph=graph,
            weights={},
            device=torch.device("cuda"),
            place=place,
        )
    assert torch.cuda.memory_allocated() == before
    assert torch.ones(2, device="cuda").sum().item() == 2.0  # CUDA is unharmed
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    return caught.value.reason


def test_by_the_header(plan: Path) -> None:
    place = Place(torch.device("cuda"))
    assert place.sm is not None
    sm = f"SM {place.sm // 10}.{place.sm % 10}"
    expected = f"the plan is for SM 8.9 and 12.0 and this GPU is {sm}"
    assert refusal(plan, place) == expected


def test_by_tensorrt_itself(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(torch.device("cuda"))
    place.sm = None  # the header is not asked
    assert "support" in refusal(plan, place)
    monkeypatch.setattr(session_module, "_check_validity", lambda *_: None)
    reason = refusal(plan, place)
    assert reason.startswith("TensorRT could not load the plan (") and "no reason" not in reason


@pytest.mark.usefixtures("plan")
def test_the_next_engine_serves(tmp_path: Path) -> None:
    """Taken for an RTX 4090, this GPU gets a plan; TensorRT refuses it and PyTorch answers."""
    tensors = {name: tensor.cuda() for name, tensor in seeded_tensors(TINY)}
    host = LiveHost("tiny", TINY, tensors, torch.device("cuda:0"))
    taken_for = Device("cuda", 0, "NVIDIA GeForce RTX 4090", 89, 24 << 30, "580.10")
    embeds = (torch.randn(1, 77, TINY.width) * 0.02).cuda()
    with AcceleratedEncoder(host, cache=EngineCache(tmp_path), device=taken_for) as encoder:
        got = encoder.encode(embeds)[1]
        report = encoder.report()
        print(report.text())
    assert report.engine == "torch_fp8"
    refused = next(r for r in report.refusals if r.engine == "tensorrt_rtx")
    assert "support" in refused.reason or "this GPU is SM" in refused.reason
    want = host.encode(embeds)[1]
    assert torch.nn.functional.cosine_similarity(got.float(), want.float(), dim=-1).mean() > 0.98
