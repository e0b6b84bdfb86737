# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""`python run.py demo`: from a checkpoint to TensorRT engines for an RTX 4090 and an RTX 5090.

Without `--model` it writes a full-size CLIP-L in ComfyUI's format, with seeded weights and the outlier
channels that real CLIP shows, and uses that.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from . import cli
from .errors import OctavoError

FOLDER = Path("build") / "demo"
GPUS = ("rtx4090", "rtx5090")


def write_seeded_clip_l(path: Path) -> None:
    """CLIP-L as ComfyUI's `clip_l.safetensors` holds it: Hugging Face names, fp16, about 246 MB."""
    from safetensors.torch import save_file

    from .seeded import CLIP_L, seeded_tensors

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(dict(seeded_tensors(CLIP_L)), partial, {"format": "pt"})
    partial.replace(path)


@click.command()
@click.option("--model", type=click.Path(path_type=Path), help="Your own checkpoint file or folder.")
@click.option("--cache", "cache_dir", type=click.Path(path_type=Path), help="Cache folder.")
@click.option("--recipe", "recipe_name", default="fp8", show_default=True)
def demo(model: Path | None, cache_dir: Path | None, recipe_name: str) -> None:
    """Recognise, calibrate, quantize, emit ONNX, compile, cache and verify; then once more from cache."""
    if model is None:
        model = FOLDER / "clip_l.safetensors"
        if not model.exists():
            click.echo(f"Writing a full-size CLIP-L with seeded weights to {model}")
            write_seeded_clip_l(model)
    cache_dir = cache_dir or FOLDER / "cache"
    common = ["--cache", str(cache_dir)]
    steps = [
        ("What is in the file", ["inspect", str(model), *common]),
        (
            f"FP8 checkpoint and TensorRT engines for {' and '.join(GPUS)}, on this machine's CPU",
            ["build", str(model), "--recipe", recipe_name, *common]
            + [word for gpu in GPUS for word in ("--gpu", gpu)],
        ),
        (
            "The same again: served from the cache",
            ["build", str(model), "--recipe", recipe_name, *common]
            + [word for gpu in GPUS for word in ("--gpu", gpu)],
        ),
        ("What the cache holds", ["cache", "list", *common]),
        ("What this machine could run", ["doctor"]),
    ]
    for title, arguments in steps:
        shown = " ".join(["octavo", *arguments])
        click.echo(f"\n== {title}\n   $ {shown}\n")
        code = cli.main(arguments)
        if code:
            sys.exit(code)


if __name__ == "__main__":
    try:
        demo.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except click.Abort:
        sys.exit(130)
    except OctavoError as error:
        click.echo(f"octavo: {error}", err=True)
        sys.exit(2)
