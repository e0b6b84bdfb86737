# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from octavo.errors import OctavoError
from octavo.trt.gpus import Gpu, gpu_from_name, gpu_from_sm, known_names, sm_text


@pytest.mark.parametrize(
    ("said", "name", "sm"),
    [
        ("rtx4060", "rtx4060", 89),
        ("RTX 4090", "rtx4090", 89),
        ("4090", "rtx4090", 89),
        ("  rtx-4070-ti-super ", "rtx4070tisuper", 89),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx4070tisuper", 89),
        ("NVIDIA GeForce RTX 4060 Ti 16GB", "rtx4060ti", 89),
        ("NVIDIA GeForce RTX 4090 D", "rtx4090d", 89),
        ("NVIDIA GeForce RTX 4050 Laptop GPU", "rtx4050", 89),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada", 89),
        ("NVIDIA RTX 4000 SFF Ada Generation", "rtx4000sffada", 89),
        ("NVIDIA RTX 500 Ada Generation Laptop GPU", "rtx500ada", 89),
        ("NVIDIA L4", "l4", 89),
        ("l40s", "l40s", 89),
        ("NVIDIA(R) GeForce(TM) RTX 5090", "rtx5090", 120),
        ("NVIDIA GeForce RTX 5090 D v2", "rtx5090dv2", 120),
        ("RTX5070Ti", "rtx5070ti", 120),
        ("NVIDIA GeForce RTX 5080 Laptop GPU", "rtx5080", 120),
        ("rtxpro6000", "rtxpro6000", 120),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtxpro6000", 120),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000", 120),
        ("NVIDIA RTX PRO 4000 Blackwell SFF Edition", "rtxpro4000sff", 120),
        ("NVIDIA RTX PRO 500 Blackwell Generation Laptop GPU", "rtxpro500", 120),
        ("NVIDIA GB10", "gb10", 121),
        ("DGX Spark", "dgxspark", 121),
        ("sm89", "sm89", 89),
        ("SM_120", "sm120", 120),
        ("sm 12.1", "sm121", 121),
        ("sm_120a", "sm120", 120),
        ("8.9", "sm89", 89),
    ],
)
def test_name(said: str, name: str, sm: int) -> None:
    assert gpu_from_name(said) == Gpu(name, sm)


def test_every_known_name_is_its_own_short_form() -> None:
    assert [gpu_from_name(name).name for name in known_names()] == list(known_names())
    assert {"rtx4060", "rtx5090", "rtx6000ada", "sm89", "sm120", "sm121"} <= set(known_names())


@pytest.mark.parametrize(
    ("said", "sm"),
    [
        ("RTX 3060", "8.6"),
        ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", "8.6"),
        ("rtx2080super", "7.5"),
        ("NVIDIA GeForce RTX 2050", "8.6"),
        ("Quadro RTX 3000", "7.5"),
        ("NVIDIA GeForce GTX 1660 SUPER", "7.5"),
        ("GTX 1080 Ti", "6.1"),
        ("GTX 980", "6.1 or older"),
        ("NVIDIA A100-SXM4-80GB", "8.0"),
        ("NVIDIA A100 80GB PCIe", "8.0"),
        ("NVIDIA RTX A6000", "8.6"),
        ("a10g", "8.6"),
        ("Tesla T4", "7.5"),
        ("Tesla V100-SXM2-16GB", "7.0"),
        ("Quadro RTX 8000", "7.5"),
        ("NVIDIA TITAN RTX", "7.5"),
        ("Orin", "8.7"),
        ("sm86", "8.6"),
        ("7.5", "7.5"),
    ],
)
def test_without_fp8(said: str, sm: str) -> None:
    with pytest.raises(
        OctavoError, match=rf" is SM {sm}; FP8 needs SM 8\.9 or newer; name an RTX 40"
    ):
        gpu_from_name(said)


def test_a_turing_name_hints_at_the_ada_card() -> None:
    with pytest.raises(OctavoError, match="rtx6000ada if that is the card"):
        gpu_from_name("RTX 6000")


@pytest.mark.parametrize(
    ("said", "sm"),
    [
        ("NVIDIA H100 80GB HBM3", "9.0"),
        ("NVIDIA H100 NVL", "9.0"),
        ("h200", "9.0"),
        ("NVIDIA GH200 480GB", "9.0"),
        ("B200", "10.0"),
        ("GB300", "10.3"),
        ("sm90", "9.0"),
        ("sm100", "10.0"),
    ],
)
def test_data_centre(said: str, sm: str) -> None:
    with pytest.raises(
        OctavoError, match=rf"SM {sm}, which TensorRT for RTX does not support;.*full"
    ):
        gpu_from_name(said)


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("rtx4091", "did you mean rtx4090"),
        ("RTX 4090 Ti", r"did you mean rtx4070ti .*rtx4090"),
        ("rtx2000", r"did you mean .*rtx2000ada"),
        ("rtx5095", "did you mean rtx5090"),
        ("Radeon RX 7900 XTX", "name it as rtx4090"),
        ("", "name it as rtx4090"),
        ("sm13", "not for SM 1.3|FP8 needs"),
        ("sm130", "not for SM 13.0"),
    ],
)
def test_unknown(said: str, remedy: str) -> None:
    with pytest.raises(OctavoError, match=remedy):
        gpu_from_name(said)


def test_sm() -> None:
    assert gpu_from_sm(120) == Gpu("sm120", 120)
    assert sm_text((89, 120)) == "SM 8.9 and 12.0"
    with pytest.raises(OctavoError, match=r"the GPU is SM 8\.0; FP8 needs"):
        gpu_from_sm(80)
