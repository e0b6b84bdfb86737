# SPDX-FileCopyrightText: The Octavo authors
# SPDX-License-Identifier: Apache-2.0
"""The command line. Exit codes: 0 done, 1 similarity under the floor, 2 bad input or environment,
130 cancelled. Results go to standard output, progress and errors to standard error."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import __version__
from .errors import Cancelled, FileError, OctavoError, SimilarityError

if TYPE_CHECKING:
    from .compile import BuildResult, Progress, Report
    from .engine_cache import EngineCache

EXIT_SIMILARITY, EXIT_ERROR, EXIT_CANCELLED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; an error is a sentence, never a traceback."""
    return run(app, arguments, "octavo")


def run(command: click.Command, arguments: Sequence[str] | None, name: str) -> int:
    """Run `command` and turn whatever it raises into a sentence and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a console may lack a character of a path
            stream.reconfigure(errors="backslashreplace")
    try:
        with _stoppable():
            given = None if arguments is None else list(arguments)
            code = command.main(args=given, prog_name=name, standalone_mode=False)
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        error.show()
    except (KeyboardInterrupt, click.Abort, Cancelled):
        _complain("cancelled; nothing partial was kept")
        return EXIT_CANCELLED
    except SimilarityError as error:
        _complain(str(error))
        return EXIT_SIMILARITY
    except OctavoError as error:
        _complain(str(error))
    except (BrokenPipeError, SystemExit):  # the reader of a pipe left; rich exits then
        _drop_output()
    except OSError as error:
        _drop_output()
        where = f"{error.filename}: " if error.filename else ""
        _complain(f"{where}{error.strerror or error}; check the path and the disk")
    except Exception as error:
        if _is_out_of_memory(error):
            _complain("out of memory; close other programs or use a larger machine")
        else:
            traceback.print_exc()
            _complain("this is a bug in Octavo; please report it with the lines above")
    return EXIT_ERROR


def _complain(sentence: str) -> None:
    click.echo(f"octavo: {sentence.rstrip('.')}.", err=True)


def _is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out: torch and ONNX Runtime have no class of their own for that."""
    words = (
        "CUDA out of memory",
        "can't allocate memory",
        "bad_alloc",
        "bad allocation",
        "Failed to allocate memory",
    )
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def _drop_output() -> None:
    """Forget what standard output still holds, if it can take no more; Python would try at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM and a closed terminal cancel like Ctrl-C, and like it leave nothing partial."""

    def stop(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # once is enough: let it tidy up
        raise Cancelled(signal.Signals(number).name)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP", "SIGBREAK"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="octavo")
def app() -> None:
    """FP8 TensorRT engines for CLIP and T5 text encoders, built on any machine.

    \b
    octavo inspect sd_xl_base.safetensors             what is in a file
    octavo build clip_l.safetensors --gpu rtx4090     FP8 checkpoint and engine, cached
    octavo verify clip_l.safetensors                  how close to FP32
    octavo doctor                                     what could serve here, and why not
    octavo cache list                                 what is on disk

    Where the cache lies: --cache, else OCTAVO_CACHE, else the platform's cache directory.
    """


JSON_ELSEWHERE = "give --json another FILE"
JSON_REMEDY = f"free some space or {JSON_ELSEWHERE}"


def _check_json(_: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse a file that cannot be written before the work whose result it should hold."""
    if value == "":
        raise _empty(param)
    if value not in (None, "-"):
        from .checkpoints.writing import refuse_unwritable
        from .doctor import may_replace

        refuse_unwritable(Path(value), JSON_ELSEWHERE)
        if Path(value).is_file() and not may_replace(Path(value)):
            raise FileError(
                value,
                "is there already and holds no result of Octavo's",
                JSON_ELSEWHERE,
            )
    return value


_json = click.option(
    "--json", "json_file", metavar="FILE", callback=_check_json,
    help="Write the result as JSON; '-' for standard output.",
)  # fmt: skip


def _empty(param: click.Parameter | None) -> OctavoError:
    name = param.opts[0] if isinstance(param, click.Option) else "MODEL"
    other = "" if param is None or param.required else ", or leave it out"
    return OctavoError(f"{name} is empty; name a file or folder{other}.")


def _given(*options: str) -> list[str]:
    """Those of `options` that are on the line of the command that runs."""
    context, typed = click.get_current_context(), click.core.ParameterSource.COMMANDLINE
    parameters = [p for p in context.command.params if p.name and p.opts[0] in options]
    return [p.opts[0] for p in parameters if context.get_parameter_source(p.name or "") is typed]


class _Place(click.Path):
    """A path. An empty one, as of an unset variable of a script, would be the current folder."""

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> Any:
        if value == "":
            raise _empty(param)
        return super().convert(value, param, context)


_PLACE = _Place(path_type=Path)
_cache = click.option("--cache", "cache_dir", metavar="DIR", type=_PLACE, help="Cache folder.")
_model = click.argument("model", type=_PLACE)
_encoder = click.option(
    "--encoder", "encoders", multiple=True, metavar="NAME",
    help="Only this encoder of the file, by name or family; repeatable. Default: all.",
)  # fmt: skip
_activation = click.option(
    "--activation", type=click.Choice(["quick_gelu", "gelu"]),
    help="Overrides what the file or the rule (quick_gelu at width 768, else gelu) says.",
)  # fmt: skip
_recipe = click.option(
    "--recipe", "recipe_name", default="fp8", show_default=True, metavar="NAME",
    help="fp8, fp8-mixed (in 16 bit: the attention output, of T5 the feed-forward's) or bf16.",
)  # fmt: skip
_algorithm = click.option(
    "--algorithm", metavar="NAME", help="Calibration: max (default), or mse with NVIDIA ModelOpt."
)
_prompts = click.option(
    "--prompts",
    type=click.IntRange(1),
    metavar="N",
    help="Calibration prompts (recipe: 128, T5 64).",
)


def _opened(cache_dir: Path | None) -> EngineCache:
    """The cache, before any work. Raises CacheError where it cannot be."""
    from .engine_cache import EngineCache

    store = EngineCache(cache_dir)
    store.refuse_impossible()
    return store


@app.command()
@_model
@_activation
@_cache
@_json
def inspect(model: Path, activation: Any, cache_dir: Path | None, json_file: str | None) -> None:
    """Name the text encoders in MODEL (a file, a shard index, or a folder).

    Reads only what it must: shapes from the header, values for the content key (remembered while
    the file does not change).
    """
    from .checkpoints import detect
    from .checkpoints.files import shown
    from .compile import content_of, encoder_key

    detected = detect(model, activation=activation)
    cache = _opened(cache_dir)
    with _progress(json_file) as report:
        found = [
            {
                "name": e.name,
                "family": e.spec.family,
                "layers": e.spec.layers,
                "width": e.spec.width,
                "positions": e.spec.longest,
                "prefix": e.prefix,
                "dtype": e.dtype,
                "key": encoder_key(e.spec, content_of(e, detected, cache, report)),
            }
            for e in detected.encoders
        ]
    if _wrote_json(json_file, {"file": str(model), "encoders": found}):
        return
    rows = [
        [e["name"], e["family"], f"{e['layers']} x {e['width']}", e["positions"], e["dtype"],
         shown(str(e["prefix"]))[1:-1] or "(none)", e["key"]]
        for e in found
    ]  # fmt: skip
    _table(str(model), ["encoder", "family", "layers", "positions", "dtype", "prefix", "key"], rows)
    for sentence in detected.unsupported:
        click.echo(sentence)


@app.command()
@_model
@click.option(
    "--gpu", "gpus", multiple=True, required=True, metavar="NAME",
    help="A card (rtx4060 ... rtx5090) or sm89, sm120, sm121; repeatable.",
)  # fmt: skip
@click.option("--portable", is_flag=True, help="One plan for all the GPUs instead of one each.")
@_recipe
@_algorithm
@_prompts
@click.option(
    "--embed-weights", is_flag=True,
    help="Self-contained plans, weights inside, instead of one small plan per architecture.",
)  # fmt: skip
@click.option(
    "--mask", is_flag=True, help="Plans with an attention mask input (T5's always have one)."
)
@_encoder
@_activation
@click.option(
    "--flavour", type=click.Choice(["tensorrt_rtx", "tensorrt"]), default="tensorrt_rtx",
    show_default=True, help="tensorrt builds only on the GPU it builds for.",
)  # fmt: skip
@_cache
@click.option(
    "--output", type=_PLACE, metavar="FILE",
    help="Also write the FP8 checkpoint here, in ComfyUI's comfy_quant layout.",
)  # fmt: skip
@_json
def build(
    model: Path,
    gpus: tuple[str, ...],
    portable: bool,
    recipe_name: str,
    algorithm: str | None,
    prompts: int | None,
    embed_weights: bool,
    mask: bool,
    encoders: tuple[str, ...],
    activation: Any,
    flavour: Any,
    cache_dir: Path | None,
    output: Path | None,
    json_file: str | None,
) -> None:
    """Quantize MODEL's text encoders to FP8 and compile TensorRT engines for the named GPUs.

    No GPU is needed. Calibration, verification against FP32 and compilation happen once; a second
    run is served from the cache.
    """
    from . import compile as compiler
    from .recipes import load_recipe
    from .trt.gpus import gpu_from_name

    recipe = load_recipe(recipe_name).with_options(algorithm, prompts)
    named = [gpu_from_name(name) for name in gpus]
    with _progress(json_file) as report:
        result = compiler.build(
            model, named, recipe=recipe, cache=_opened(cache_dir), portable=portable,
            embed_weights=embed_weights, encoders=encoders, output=output, activation=activation,
            flavour=flavour, mask=mask, report=report,
        )  # fmt: skip
    given = _given("--recipe", "--algorithm", "--prompts")
    if given and any(b.encoder.quantized or b.noted for b in result.encoders):
        note = f"{model.name} is quantized already; {', '.join(given)} did nothing to it."
        click.echo(f"Note: {note}", err=True)
    if not _wrote_json(json_file, result.facts()):
        show_build(result)
        if output is not None:
            click.echo(f"The checkpoint is also at {output}")
            if any(not b.encoder.spec.family.endswith("t5_xxl") for b in result.encoders):
                note = "ComfyUI without Octavo's nodes ignores the scales of such a file"
                click.echo(f"Note: {note}; do not load it there.", err=True)


@app.command()
@_model
@_recipe
@_algorithm
@_prompts
@_encoder
@_activation
@_cache
@_json
def verify(
    model: Path,
    recipe_name: str,
    algorithm: str | None,
    prompts: int | None,
    encoders: tuple[str, ...],
    activation: Any,
    cache_dir: Path | None,
    json_file: str | None,
) -> None:
    """Measure the FP8 graph of MODEL against its FP32 reference on every held-out prompt.

    ONNX Runtime runs the graph that is compiled. Exit code 1 if a cosine is under the recipe's
    floor.
    """
    from . import compile as compiler
    from .recipes import load_recipe

    recipe = load_recipe(recipe_name).with_options(algorithm, prompts)
    with _progress(json_file) as report:
        results = compiler.verify(
            model, recipe=recipe, cache=_opened(cache_dir), encoders=encoders,
            activation=activation, report=report,
        )  # fmt: skip
    short = [f"{r.name}: {r.shortfall}" for r in results if r.shortfall]
    data = {
        "file": str(model),
        "recipe": recipe.name,
        "encoders": [r.facts() for r in results],
    }
    if not _wrote_json(json_file, data):
        rows = [
            [r.name, *(_cosine(r.similarity[k]) for k in ("token_mean", "token_min", "pooled")),
             _error(r.similarity["max_abs_error"]), r.similarity["prompts"], r.judge]
            for r in results
        ]  # fmt: skip
        columns = ["encoder", "token mean", "token min", "pooled", "max error", "prompts", "judge"]
        _table(f"{model} with {recipe.name} against FP32 (cosines)", columns, rows)
    if short:
        raise SimilarityError(f"recipe {recipe.name}, {'; '.join(short)}.")


@app.command()
@click.argument("model", required=False, type=_PLACE)
@click.option(
    "--seeded", type=click.Choice(["clip_l", "clip_h", "clip_g", "t5_xxl", "umt5_xxl"]),
    default="clip_l",
    show_default=True, help="Without MODEL: a full-size encoder with seeded weights.",
)  # fmt: skip
@click.option("--shapes", help="batch x tokens, ...  [default: 1x77,2x77; for T5 1x256,1x512]")
@click.option("--repeats", type=click.IntRange(5), default=50, show_default=True)
@click.option("--compiled/--no-compiled", default=True, help="Also transformers by torch.compile.")
@_encoder
@_cache
@_json
def bench(
    model: Path | None,
    seeded: str,
    shapes: str | None,
    repeats: int,
    compiled: bool,
    encoders: tuple[str, ...],
    cache_dir: Path | None,
    json_file: str | None,
) -> None:
    """Time every engine that can serve here beside ComfyUI's way, half precision and torch.compile.

    Medians in milliseconds, in one process; the last columns are floors: the FP8 GEMMs alone, and
    reading the weights once. A MODEL that is FP8 already is widened to FP32 in memory, four bytes
    a value, and quantized anew: its engines take the same time, its similarity is not the file's.
    """
    from . import bench as bench_module

    wanted = None if shapes is None else bench_module.parse_shapes(shapes)
    store = _opened(cache_dir)
    say = partial(click.echo, err=True)
    results = [
        bench_module.bench(
            host, bench_module.shapes_of(host.spec, wanted, say),
            cache=store, repeats=repeats, compiled=compiled, say=say,
        )
        for host in _bench_hosts(model, seeded, encoders)
    ]  # fmt: skip
    if _wrote_json(json_file, {"encoders": [r.facts() for r in results]}):
        return
    for result in results:
        _show_bench(result)


def _bench_hosts(model: Path | None, seeded: str, encoders: tuple[str, ...]) -> Iterator[Any]:
    """The encoders to time, one after the other, so that only one lies on the device."""
    import torch

    from .bench import LiveHost

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if model is None:
        from . import seeded as seeds

        spec = getattr(seeds, seeded.upper())
        # T5 is drawn on the device: 4.8 billion values take minutes on a CPU.
        drawn = seeds.seeded_tensors(spec, device=device if "t5" in seeded else "cpu")
        tensors = {n: t.to(device) for n, t in drawn}
        yield LiveHost(f"seeded {seeded}", spec, tensors, device)
        return
    from .checkpoints import detect
    from .compile import select

    for encoder in select(detect(model), encoders):
        if encoder.quantized:
            values = sum(math.prod(linear.shape) for linear in encoder.quantized.values())
            click.echo(
                f"{encoder.name}: its FP8 weights are widened to FP32 ({_size(4 * values)}) and "
                "quantized anew; 'octavo verify' measures the file as it is.",
                err=True,
            )
        tensors = {n: encoder.read(n).to(device) for n in encoder.names()}
        yield LiveHost(encoder.name, encoder.spec, tensors, device)


def _show_bench(result: Any) -> None:
    shapes = list(dict.fromkeys((r.batch, r.tokens) for r in result.rows))
    floors = {(f["batch"], f["tokens"]): f for f in result.floors}
    rows = []
    for way in dict.fromkeys(r.way for r in result.rows):
        for shape in shapes:
            row = next(
                (r for r in result.rows if (r.way, r.batch, r.tokens) == (way, *shape)), None
            )
            if row is None:
                continue
            base, floor = result.median("comfyui", shape), floors.get(shape, {})
            gemm = floor.get("fp8_gemms_ms")
            traffic = floor.get("weight_traffic_ms")
            rows.append(
                [way, f"{shape[0]}x{shape[1]}", f"{row.median_ms:.3f}",
                 f"{row.low_ms:.3f} - {row.high_ms:.3f}",
                 "-" if not base else f"{base / row.median_ms:.1f}x", _cosine(row.token_mean),
                 "-" if gemm is None else f"{gemm:.3f}",
                 "-" if traffic is None else f"{traffic:.3f}"]
            )  # fmt: skip
    columns = ["way", "shape", "median ms", "10 - 90 %", "speed", "token mean", "FP8 GEMMs ms",
               "weights read ms"]  # fmt: skip
    _table(f"{result.encoder} on {result.device}", columns, rows)
    for report in result.reports:
        click.echo(report)
    for name, reason in result.skipped.items():
        click.echo(f"not timed: {name}: {reason}")


@app.command()
@_json
def doctor(json_file: str | None) -> None:
    """What is installed, which GPU there is, which engine could serve and why the others not."""
    from . import doctor as doctor_module

    facts = doctor_module.examine()
    if not _wrote_json(json_file, facts):
        click.echo(doctor_module.text(facts))


@app.group()
def cache() -> None:
    """Look at, check and tidy the cache of checkpoints and plans."""


@cache.command("list")
@_cache
@_json
def cache_list(cache_dir: Path | None, json_file: str | None) -> None:
    """Every entry, the last used first."""
    store = _opened(cache_dir)
    entries = [_entry_facts(entry) for entry in store.entries()]
    total = sum(e["bytes"] for e in entries)
    facts = {
        "root": str(store.root),
        "bytes": total,
        "budget_bytes": store.budget_bytes,
        "entries": entries,
    }
    if _wrote_json(json_file, facts):
        return
    rows = [[e["kind"], e["key"], _size(e["bytes"]), e["what"]] for e in entries]
    _table(str(store.root), ["kind", "key", "size", "what"], rows)
    click.echo(f"{len(entries)} entries, {_size(total)} of {_size(store.budget_bytes)}")


@cache.command("verify")
@_cache
@_json
def cache_verify(cache_dir: Path | None, json_file: str | None) -> None:
    """Read everything and remove what is damaged (it will be built again)."""
    store = _opened(cache_dir)
    checked = store.verify_all()
    facts = [
        {"kind": c.kind, "key": c.key, "ok": c.fault is None, "fault": c.fault or ""}
        for c in checked
    ]
    if _wrote_json(json_file, {"root": str(store.root), "entries": facts}):
        return
    bad = [f for f in facts if not f["ok"]]
    for found in checked:
        if found.fault is not None:
            done = "removed" if found.removed else "left alone"
            click.echo(f"{done}: {found.kind} {found.key}: {found.fault}")
    removed = sum(found.removed for found in checked)
    left = len(bad) - removed
    others = f", of another version or unreadable: {left}" if left else ""
    click.echo(f"whole: {len(facts) - len(bad)}, damaged and removed: {removed}{others}")


@cache.command("prune")
@click.option("--budget", metavar="SIZE", help="Such as 5G; default: the cache's own budget.")
@click.option("--dry-run", is_flag=True, help="Only show what would go.")
@_cache
@_json
def cache_prune(
    budget: str | None, dry_run: bool, cache_dir: Path | None, json_file: str | None
) -> None:
    """Delete what was unused longest until the rest fits the budget."""
    from .engine_cache import parse_size

    store = _opened(cache_dir)
    plan = store.plan_prune(None if budget is None else parse_size(budget, "--budget"))
    gone: list[dict[str, Any]] = [
        {"kind": d.kind, "key": d.key, "bytes": d.size_bytes} for d in plan.goes
    ]
    freed = plan.freed_bytes if dry_run else plan.execute()
    facts = {
        "root": str(store.root),
        "entries": gone,
        "freed_bytes": freed,
        "kept_bytes": plan.kept_bytes,
        "dry_run": dry_run,
    }
    if _wrote_json(json_file, facts):
        return
    for entry in gone:
        click.echo(f"{entry['kind']} {entry['key']} {_size(entry['bytes'])}")
    verb = "would be freed" if dry_run else "freed"
    click.echo(f"{_size(freed)} {verb}, {_size(plan.kept_bytes)} kept.")


@cache.command("clear")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_cache
@_json
def cache_clear(yes: bool, cache_dir: Path | None, json_file: str | None) -> None:
    """Delete every checkpoint and plan (never other files)."""
    store = _opened(cache_dir)
    if not yes:
        try:
            question = f"Delete every checkpoint and plan in {store.root}?"
            click.confirm(question, abort=True, err=True)
        except click.Abort:
            if sys.stdin.isatty():
                raise
            raise OctavoError("nothing was deleted: nobody said yes; give --yes.") from None
    freed = store.clear()
    if not _wrote_json(json_file, {"root": str(store.root), "freed_bytes": freed}):
        click.echo(f"{_size(freed)} freed.")


# What a person sees


def show_build(result: BuildResult) -> None:
    """The table of a build: one row per engine."""

    for built in result.encoders:
        s = built.similarity
        spec = built.encoder.spec
        click.echo(
            f"{built.encoder.name}: {spec.family}, {spec.layers} layers x {spec.width}, "
            f"{spec.longest} positions, {built.encoder.dtype}"
        )
        state = "from the cache" if built.checkpoint_cached else "made now"
        size = _size(built.checkpoint.manifest.length)
        click.echo(f"  checkpoint {size} ({state}): {built.checkpoint.path}")
        if s:
            click.echo(
                f"  similarity to FP32: token mean {_cosine(s.get('token_mean'))}, token min "
                f"{_cosine(s.get('token_min'))}, pooled {_cosine(s.get('pooled'))} "
                f"({s.get('prompts')} held-out prompts, {s.get('judge')}"
                f"{', as noted in the file' if built.noted else ''})"
            )
        rows = [
            [e.gpu, "+".join(f"{sm // 10}.{sm % 10}" for sm in e.sms), f"{e.flavour} {e.version}",
             e.weights, _size(e.bytes), "cached" if e.cached else f"{e.seconds:.1f} s", e.path]
            for e in built.engines
        ]  # fmt: skip
        columns = ["GPU", "SM", "built by", "weights", "plan", "time", "file"]
        _table(None, columns, rows)
    for sentence in result.unsupported:
        click.echo(sentence)
    memory = _size(result.peak_rss_bytes)
    click.echo(f"{result.seconds:.1f} s, peak memory {memory}, recipe {result.recipe}")


def _entry_facts(entry: Any) -> dict[str, Any]:
    facts, key = entry.manifest.facts, entry.manifest.key_facts
    if entry.manifest.kind == "plan":
        sms = ", ".join(f"SM {sm // 10}.{sm % 10}" for sm in key["sms"])
        builder = f"{key['flavour']} {key['version']}"
        what = f"{facts.get('encoder', 'encoder')} {key['weights']} for {sms}, {builder}"
    else:
        spec = key["spec_facts"]
        size = f"{spec['layers']} x {spec['width']}"
        what = f"{spec['encoder']} in {facts.get('recipe', '?')}, {size}"
    return {
        "kind": entry.manifest.kind,
        "key": entry.manifest.key,
        "path": str(entry.path),
        "bytes": entry.manifest.length,
        "last_use": entry.last_use,
        "what": what,
    }


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"


def _cosine(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _error(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3f}"


def _table(title: str | None, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 200  # a pipe or a log has no width of its own
    console.print(table)


@contextmanager
def _progress(json_file: str | None) -> Iterator[Report]:
    """Progress on standard error: bars on a terminal, one line per phase elsewhere."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, markup=False)
    if not console.is_terminal:
        yield _line_per_phase(lambda text: click.echo(text, err=True))
        return
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    with Bars(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(),
        console=console, transient=True,
    ) as bars:  # fmt: skip
        current: dict[str, Any] = {"phase": None, "task": None}

        def report(p: Progress) -> None:
            phase = (p.subject, p.phase)
            if phase != current["phase"]:
                if current["task"] is not None:
                    bars.remove_task(current["task"])
                text = f"{p.subject}: {p.phase}"
                current.update(phase=phase, task=bars.add_task(text, total=p.total or None))
            bars.update(current["task"], completed=p.done, total=p.total or None)

        yield report


def _line_per_phase(write: Callable[[str], None]) -> Report:
    last: list[tuple[str, str]] = []

    def report(p: Progress) -> None:
        phase = (p.subject, p.phase)
        if last != [phase]:
            last[:] = [phase]
            write(f"{p.subject}: {p.phase}")

    return report


def _wrote_json(json_file: str | None, facts: Any) -> bool:
    """Write `facts` if JSON was asked for; True if to standard output, so that no table follows."""
    if json_file is None:
        return False
    data = json.dumps(facts, indent=1, allow_nan=False) + "\n"
    if json_file == "-":
        sys.stdout.write(data)
        return True
    from .checkpoints.writing import whole_file

    with whole_file(Path(json_file), JSON_REMEDY) as file:
        file.write(data.encode())
    return False


if __name__ == "__main__":
    sys.exit(main())
