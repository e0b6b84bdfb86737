# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""GPU names to compute capabilities (SM), for plans that are built where that GPU is not.

Source: NVIDIA's list, developer.nvidia.com/cuda-gpus. Only the SM ever reaches a plan.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from ..errors import OctavoError

FP8_SM = 89  # the first with FP8 tensor cores

_NAMES = {
    89: "rtx4050 rtx4060 rtx4060ti rtx4070 rtx4070super rtx4070ti rtx4070tisuper rtx4080"
    " rtx4080super rtx4090 rtx4090d rtx500ada rtx1000ada rtx2000ada rtx3000ada rtx3500ada"
    " rtx4000ada rtx4000sffada rtx4500ada rtx5000ada rtx5880ada rtx6000ada l2 l4 l20 l40 l40s",
    120: "rtx5050 rtx5060 rtx5060ti rtx5070 rtx5070ti rtx5080 rtx5090 rtx5090d rtx5090dv2"
    " rtxpro500 rtxpro1000 rtxpro2000 rtxpro3000 rtxpro4000 rtxpro4000sff rtxpro4500"
    " rtxpro5000 rtxpro6000 rtxpro6000d",
    121: "gb10 dgxspark",
}
_SM_OF = {name: sm for sm, names in _NAMES.items() for name in names.split()}
# Patterns of the simplified name: a refusal need not list every card that was ever sold.
_WITHOUT_FP8 = {
    r"(rtx)?(30[5-9]0|2050)(ti|super)*": "8.6",
    r"(rtx)?20[678]0(ti|super)*|(gtx)?16\d\d(ti|super)*": "7.5",
    r"(gtx)?10\d\d(ti|super)*|p4|p6|p40|titanxp?": "6.1",
    r"(rtx)?a(400|500|1000|2000|3000|4000|4500|5000|5500|6000)|a2|a10[gm]?|a16|a40": "8.6",
    r"a100x?|a800|a30x?": "8.0",
    r"v100s?|titanv": "7.0",
    r"t4g?|t\d{3,4}|(quadro)?rtx[34568]000|titanrtx": "7.5",
    r"(jetson)?(agx)?orin(nano|nx)?": "8.7",
    r"p100|gtx\w+|quadro\w+|[km]\d\d?": "6.1 or older",
}
_DATA_CENTRE = {
    r"g?h(20|100|200|800)": 90,
    r"g?b(100|200)": 100,
    r"g?b300": 103,
    r"(jetson)?(agx)?thor": 110,
}
# What torch and nvidia-smi add to a name without changing the SM.
_DECORATION = re.compile(
    r"\((r|tm)\)|\b(nvidia|geforce|tesla|gpu|graphics|generation|laptop|mobile|blackwell|max q"
    r"|workstation|server|edition|pcie|nvl|sxm\d?|hbm\d?e?|\d+ ?gb)\b"
)
_SM = re.compile(r"(?:(?:sm|cc)[ _]?)(\d{1,2})\.?(\d)[af]?|(\d{1,2})\.(\d)")


@dataclass(frozen=True)
class Gpu:
    """A GPU a plan can be built for: `name` in the short form, `sm` as 89 for 8.9."""

    name: str
    sm: int


def known_names() -> tuple[str, ...]:
    """Every name `gpu_from_name` takes, in its short form."""
    return (*_SM_OF, *(f"sm{sm}" for sm in _NAMES))


def sm_text(sms: Iterable[int]) -> str:
    """(89, 120) -> "SM 8.9 and 12.0"."""
    return "SM " + " and ".join(f"{sm // 10}.{sm % 10}" for sm in sms)


def gpu_from_name(name: str) -> Gpu:
    """ "RTX 4090", "sm89", or what `torch.cuda.get_device_name` returns -> `Gpu`.

    Raises `OctavoError` with the reason: no FP8, not served by TensorRT for RTX, or unknown.
    """
    shown = " ".join(name.split())
    lowered = shown.lower()
    if said := _SM.fullmatch(lowered):
        return gpu_from_sm(int("".join(digits for digits in said.groups() if digits)))
    key = re.sub(r"[^a-z0-9]", "", _DECORATION.sub(" ", lowered.replace("-", " ")))
    for known in (key, "rtx" + key):
        if known in _SM_OF:
            return Gpu(known, _SM_OF[known])
    for pattern, text in _WITHOUT_FP8.items():
        if re.fullmatch(pattern, key):
            raise _without_fp8(f"{shown} is SM {text}", key + "ada")
    for pattern, sm in _DATA_CENTRE.items():
        if re.fullmatch(pattern, key):
            raise _data_centre(f"{shown} is {sm_text([sm])}")
    close = get_close_matches(key, known_names(), n=3, cutoff=0.7)
    remedy = f"did you mean {' or '.join(close)}" if close else "name it as rtx4090, l40s or sm120"
    raise OctavoError(f"{shown!r} is not a GPU that Octavo knows; {remedy}.")


def gpu_from_sm(sm: int) -> Gpu:
    """120 -> Gpu("sm120", 120). Raises `OctavoError` as `gpu_from_name` does."""
    if sm in _NAMES:
        return Gpu(f"sm{sm}", sm)
    if sm < FP8_SM:
        raise _without_fp8(f"the GPU is {sm_text([sm])}")
    if sm in _DATA_CENTRE.values():
        raise _data_centre(f"the GPU is {sm_text([sm])}")
    raise OctavoError(f"Octavo builds plans for {sm_text(_NAMES)}, not for {sm_text([sm])}.")


def _without_fp8(found: str, perhaps: str = "") -> OctavoError:
    hint = f", or {perhaps} if that is the card" if perhaps in _SM_OF else ""
    return OctavoError(f"{found}; FP8 needs SM 8.9 or newer; name an RTX 40 or RTX 50 card{hint}.")


def _data_centre(found: str) -> OctavoError:
    return OctavoError(
        f"{found}, which TensorRT for RTX does not support; install the full tensorrt package on"
        " the machine with that GPU and build there."
    )
