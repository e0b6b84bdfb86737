# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""`python run.py demo`: from a checkpoint to TensorRT engines for an RTX 4090 and an RTX 5090.

Without `--model` it writes a full-size CLIP-L in ComfyUI's format, with seeded weights and the
outlier channels that real CLIP shows, and uses that.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from . import cli

GPUS = ("rtx4090", "rtx5090")


def write_seeded_clip_l(path: Path) -> None:
    """CLIP-L as ComfyUI's `clip_l.safetensors` holds it: Hugging Face names, fp16, about 246 MB."""
    from .checkpoints.writing import whole_file, write_safetensors
    from .seeded import CLIP_L, seeded_tensors

    with whole_file(path, "free some space or choose another --folder") as file:
        write_safetensors(file, dict(seeded_tensors(CLIP_L)), {"format": "pt"})


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--model", type=click.Path(path_type=Path), help="Your own checkpoint file or folder."
)
@click.option("--cache", "cache_dir", type=click.Path(path_type=Path), help="Cache folder.")
@click.option("--recipe", "recipe_name", default="fp8", show_default=True)
@click.option(
    "--folder", type=click.Path(path_type=Path), default=Path("build", "demo"), show_default=True,
    help="Where the seeded checkpoint and the cache go.",
)  # fmt: skip
def demo(model: Path | None, cache_dir: Path | None, recipe_name: str, folder: Path) -> None:
    """Recognise, calibrate, quantize, compile, cache and verify; then once more from the cache."""
    if model is None:
        model = folder / "clip_l.safetensors"
        if not model.exists():
            click.echo(f"Writing a full-size CLIP-L with seeded weights to {model}")
            write_seeded_clip_l(model)
    common = ["--cache", str(cache_dir or folder / "cache")]
    build = ["build", str(model), "--recipe", recipe_name, *common]
    build += [word for gpu in GPUS for word in ("--gpu", gpu)]
    engines = f"FP8 checkpoint and TensorRT engines for {' and '.join(GPUS)}"
    steps = [
        ("What is in the file", ["inspect", str(model), *common]),
        (f"{engines}, on this machine's CPU", build),
        ("The same again: served from the cache", build),
        ("What the cache holds", ["cache", "list", *common]),
        ("What this machine could run", ["doctor"]),
    ]
    for title, arguments in steps:
        click.echo(f"\n== {title}\n   $ {shlex.join(['octavo', *arguments])}\n")
        code = cli.main(arguments)
        if code:
            raise click.exceptions.Exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit code, the command line's own."""
    return cli.run(demo, arguments, "demo")


if __name__ == "__main__":
    sys.exit(main())
