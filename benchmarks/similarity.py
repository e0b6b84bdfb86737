# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""How near each recipe comes to FP32 on full-size encoders, beside its targets.

    .venv/bin/python benchmarks/similarity.py [--encoder clip_l] [--recipe fp8] [--algorithm mse]
    .venv/bin/python benchmarks/similarity.py --device cuda --batch 1 --recipe fp8 --held-out 32

Seeded weights with outlier channels, so the numbers compare recipes and say nothing of a trained
encoder. In one process and without the cache: calibration, quantization, then ONNX Runtime on the
graph that would be compiled, or `torch_fp8` on a GPU, against the FP32 reference on held-out
prompts. benchmarks/build.py measures the whole job. Prints a table; exits with 1 if a target is
missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, replace

import torch
from octavo.backends.torch_ops import ReferenceEncoder
from octavo.calibrate import Calibration, calibrate
from octavo.checkpoints.quantized import quantized_tensors
from octavo.compile import sample, similarity_of
from octavo.recipes import ALGORITHMS, NAMES, load_recipe
from octavo.seeded import CLIP_G, CLIP_H, CLIP_L, seeded_tensors
from octavo.verify import reference_run, states_of

ENCODERS = {"clip_l": CLIP_L, "clip_h": CLIP_H, "clip_g": CLIP_G}
TARGETS = {
    "fp8": {"token_mean": 0.993, "token_min": 0.98, "pooled": 0.993},
    "fp8-mixed": {"token_mean": 0.995},
    "bf16": {"token_mean": 0.9995},
}
COLUMNS = ("token_mean", "token_min", "pooled", "max_abs_error")


def measure_encoder(name: str, options: argparse.Namespace) -> bool:
    """Print a row per recipe; True if every target holds."""
    spec, start, device = ENCODERS[name], time.monotonic(), torch.device(options.device)
    recipes = options.recipe or list(NAMES)
    read = {n: t.to(device) for n, t in seeded_tensors(spec)}.__getitem__
    judged = sample(spec, read, True, options.held_out)
    judged = replace(judged, embeds=judged.embeds.to(device))
    reference = ReferenceEncoder(spec, read, device=device)
    expected = states_of(reference_run(reference), judged.embeds, judged.rows, judged.projection)
    ranges = Calibration({}, None, "none")
    if any(load_recipe(recipe).calibrated for recipe in recipes):
        shown = sample(spec, read, False, options.prompts, "calibration").embeds.to(device)
        chosen = load_recipe("fp8").with_options(options.algorithm)
        # After this the module is fake-quantized.
        ranges = calibrate(reference, shown.split(16), chosen)
    del reference
    good = True
    for recipe_name in recipes:
        recipe = load_recipe(recipe_name)
        structure = recipe.structure(spec.linears())
        tensors = quantized_tensors(
            spec, read, structure, ranges.input_amax, weight_amax=ranges.weight_amax
        )
        found, judge = similarity_of(
            spec, structure, recipe.body, tensors.__getitem__, judged, expected,
            device=device, batch=options.batch,
        )  # fmt: skip
        facts = asdict(found)
        missed = [n for n, least in TARGETS[recipe_name].items() if not facts[n] >= least]
        good &= not missed
        cells = " | ".join(f"{facts[column]:.5f}" for column in COLUMNS)
        verdict = f"misses {', '.join(missed)}" if missed else "yes"
        seconds = time.monotonic() - start
        print(
            f"| {name} | {recipe_name} | {ranges.method if recipe.calibrated else '-'} | {cells} "
            f"| {verdict} | {judge} | {seconds:.0f} |",
            flush=True,
        )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--encoder", action="append", choices=ENCODERS)
    parser.add_argument("--recipe", action="append", choices=NAMES)
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="max")
    parser.add_argument("--prompts", type=int, default=32, help="for calibration (recipes: 128)")
    parser.add_argument("--held-out", type=int, default=16)
    parser.add_argument("--device", default="cpu", help="a GPU, such as cuda: judged by torch_fp8")
    parser.add_argument("--batch", type=int, default=8, help="prompts that are encoded at once")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {options.prompts} calibration prompts, ", end="")
    print(f"{options.held_out} held-out prompts\n")
    print(f"| encoder | recipe | calibrated by | {' | '.join(COLUMNS)} | reached | judge | s |")
    print("|" + "---|" * (6 + len(COLUMNS)))
    results = [measure_encoder(name, options) for name in options.encoder or ENCODERS]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
