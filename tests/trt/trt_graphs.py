# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Small ONNX graphs in the form that plans are built from: CLIP-like FP8 blocks, by hand."""

from __future__ import annotations

import dataclasses
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from octavo.trt.build import BuildRequest
from onnx import TensorProto, helper

FP8, FP16, INT64 = TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT16, TensorProto.INT64
WIDTH, FEED_FORWARD, HEADS, TOKENS = 256, 512, 4, 77
LINEARS = ("qkv", "out", "fc1", "fc2")
ACTIVATION_SCALE, WEIGHT_SCALE = 2.0**-4, 2.0**-10  # fixed powers of two; real scales are inputs


@dataclass
class Graph:
    """CLIP blocks whose linears are FP8 x FP8 and whose weights are inputs.

    `embedded`: FP8 weights are external initializers. `activations` False: only weights are FP8.
    """

    embedded: bool = False
    activations: bool = True
    nodes: list = field(default_factory=list)
    inputs: list = field(default_factory=list)
    constants: list = field(default_factory=list)
    weights: dict[str, tuple[int, int]] = field(default_factory=dict)

    def op(self, kind: str, *inputs: str, name: str = "", **attributes: object) -> str:
        output = name or f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def input(self, name: str, dtype: int, *shape: int | str) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def constant(self, values: object, dtype: int = FP16) -> str:
        name = f"constant_{len(self.constants)}"
        array = np.asarray(values, np.int64 if dtype == INT64 else np.float16)
        tensor = helper.make_tensor(name, dtype, array.shape, array.tobytes(), raw=True)
        self.constants.append(tensor)
        return name

    def zero(self) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(helper.make_tensor(name, FP8, (), b"\0", raw=True))
        return name

    def weight(self, name: str, out: int, inner: int) -> str:
        if not self.embedded:
            return self.input(name, FP8, out, inner)
        self.weights[name] = (out, inner)
        tensor = TensorProto(name=name, data_type=FP8, dims=(out, inner))
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="given-by-address")
        self.constants.append(tensor)
        return name

    def linear(self, x: str, name: str, out: int, inner: int) -> str:
        x = self.op("Mul", x, self.input(name + ".inverse", FP16, 1))
        if self.activations:
            scale = self.constant(ACTIVATION_SCALE)
            x = self.op("QuantizeLinear", x, scale, self.zero())
            x = self.op("DequantizeLinear", x, scale, self.zero())
        weight = self.weight(name + ".weight", out, inner)
        weight = self.op("DequantizeLinear", weight, self.constant(WEIGHT_SCALE), self.zero())
        y = self.op("MatMul", x, self.op("Transpose", weight, perm=[1, 0]), name=name)
        y = self.op("Mul", y, self.input(name + ".scale", FP16, out))
        return self.op("Add", y, self.input(name + ".bias", FP16, out))

    def norm(self, x: str, name: str) -> str:
        gain = self.input(name + ".weight", FP16, WIDTH)
        return self.op("LayerNormalization", x, gain, self.input(name + ".bias", FP16, WIDTH))

    def block(self, x: str, prefix: str) -> str:
        d, h, f = WIDTH, HEADS, FEED_FORWARD
        y = self.linear(self.norm(x, prefix + "norm1"), prefix + "qkv", 3 * d, d)
        y = self.op("Reshape", y, self.constant([0, 0, 3, h, d // h], INT64))  # [B, S, 3, H, D]
        y = self.op("Transpose", y, perm=[2, 0, 3, 1, 4])  # [3, B, H, S, D]
        q, k, v = (self.op("Gather", y, self.constant(i, INT64), axis=0) for i in range(3))
        q = self.op("Mul", q, self.constant((d // h) ** -0.5))
        k = self.op("Transpose", k, perm=[0, 1, 3, 2])
        causal = self.constant(np.triu(np.full((1, 1, TOKENS, TOKENS), -60000.0), 1))
        scores = self.op("Add", self.op("MatMul", q, k, name=prefix + "scores"), causal)
        y = self.op("MatMul", self.op("Softmax", scores, axis=-1), v, name=prefix + "context")
        y = self.op("Transpose", y, perm=[0, 2, 1, 3])  # [B, S, H, D]
        y = self.op("Reshape", y, self.constant([0, 0, d], INT64))
        x = self.op("Add", x, self.linear(y, prefix + "out", d, d))
        y = self.linear(self.norm(x, prefix + "norm2"), prefix + "fc1", f, d)
        y = self.op("Mul", y, self.op("Sigmoid", self.op("Mul", y, self.constant(1.702))))
        return self.op("Add", x, self.linear(y, prefix + "fc2", d, f))

    def model(self, layers: int = 1) -> bytes:
        x = self.input("embeds", FP16, "batch", TOKENS, WIDTH)
        for index in range(layers):
            x = self.block(x, "" if layers == 1 else f"{index}.")
        output = helper.make_tensor_value_info(x, FP16, ["batch", TOKENS, WIDTH])
        graph = helper.make_graph(self.nodes, "clip", self.inputs, [output], self.constants)
        opset = [helper.make_opsetid("", 23)]
        return helper.make_model(graph, opset_imports=opset, ir_version=11).SerializeToString()


PROFILE = {"embeds": tuple((batch, TOKENS, WIDTH) for batch in (1, 2, 16))}


BLOCK = Graph().model()
TOWER = Graph().model(layers=16)  # large enough to be interrupted: two seconds of compilation


def request_of(onnx: bytes, /, *sms: int, **changes: object) -> BuildRequest:
    request = BuildRequest("tensorrt_rtx", onnx, sms, PROFILE)
    return dataclasses.replace(request, **changes)


def write_safetensors(path: Path, shapes: dict[str, tuple[int, int]]) -> dict:
    """Random FP8 bytes (no NaN) in a real safetensors file -> name: (path, offset, size)."""
    random, header, body = np.random.default_rng(0), {}, b""
    for name, shape in shapes.items():
        data = random.integers(0, 0x70, shape, np.uint8).tobytes()
        span = [len(body), len(body) + len(data)]
        header[name] = {"dtype": "F8_E4M3", "shape": list(shape), "data_offsets": span}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    start = 8 + len(text)
    spans = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: (path, start + a, b - a) for name, (a, b) in spans.items()}
