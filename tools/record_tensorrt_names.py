# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""Record the names of the full TensorRT's Python bindings, for tests on machines without it.

    python tools/record_tensorrt_names.py > tests/trt/data/tensorrt_names.json

The bindings are a wheel of 1 MB, the libraries behind them one of gigabytes. The bindings import
with stub libraries, so only Linux x86-64, pip and a C compiler are needed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEELS = ("tensorrt-cu13-bindings==10.13.3.9.post1", "tensorrt-cu13-bindings==11.4.0.106")
LIBRARIES = ("libnvinfer", "libnvinfer_plugin", "libnvonnxparser")
SYMBOLS = (  # what the bindings import from the libraries: nm -D --undefined-only tensorrt.so
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
)
# Whatever a builder or a session may touch.
CLASSES = """
    Builder BuilderFlag DataType ExecutionContextAllocationStrategy HardwareCompatibilityLevel
    IBuilderConfig ICudaEngine IExecutionContext IHostMemory ILayer ILogger INetworkDefinition
    IOptimizationProfile IOutputAllocator IProgressMonitor IRuntimeConfig ISerializationConfig
    IStreamReaderV2 IStreamWriter ITensor Logger MemoryPoolType NetworkDefinitionCreationFlag
    OnnxParser ParserError ProfilingVerbosity Runtime TensorFormat TensorIOMode TensorLocation
"""
DUMP = """\
import json, sys, tensorrt_bindings as trt
public = lambda thing: [name for name in dir(thing) if not name.startswith("_")]
names = {n: public(getattr(trt, n)) for n in sys.argv[1:] if hasattr(trt, n)}
print(json.dumps({"": public(trt), **names}))
"""


def record(wheel: str, folder: Path) -> dict[str, list[str]]:
    """Class name ("" for the module itself) -> its public names."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, "--only-binary=:all:", wheel], check=True)
    (file,) = folder.glob("*.whl")
    zipfile.ZipFile(file).extractall(folder)
    source = folder / "stub.c"
    source.write_text("".join(f"void *{symbol}(void) {{ return 0; }}\n" for symbol in SYMBOLS))
    major = wheel.split("==")[1].split(".")[0]
    for library in LIBRARIES:
        output = str(folder / f"{library}.so.{major}")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", output, str(source)], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", DUMP, *CLASSES.split()],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
    )
    names: dict[str, list[str]] = json.loads(done.stdout)
    return names


def main() -> None:
    recorded = {}
    for wheel in WHEELS:
        with tempfile.TemporaryDirectory() as folder:
            recorded[wheel.split("==")[1]] = record(wheel, Path(folder))
    rows = (
        f'"{version}": {{\n'
        + ",\n".join(f'  "{name}": {json.dumps(members)}' for name, members in names.items())
        + "\n}"
        for version, names in recorded.items()
    )
    sys.stdout.write("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
