"""`remat.checkpoint` lowers the compiled peak memory where `jax.checkpoint` does not.

Both are applied in the same ways to the same models, in one process, and the
executables of `jit(value_and_grad(loss))` are compared: temporary memory and FLOPs as
XLA reports them, seconds to build, seconds of one step. See README.md beside this
file.
"""

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Run as a script, only this folder is on the path, not the root of the repository,
# from which `benchmarks` is imported.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
from jax import Array
from rich import box
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import remat
from benchmarks.measure import (
    MIB,
    BuildTime,
    build,
    call_seconds,
    environment,
    paired_ratio,
    rounds,
)
from benchmarks.models import gpt, mlp

Transform = Callable[[Callable[..., Any]], Callable[..., Any]]

NO_REMAT = "no remat"
TITLES = {
    "a": "(a) named outputs",
    "b": "(b) dots",
    "c": "(c) every block",
    "loop": "blocks in a scan",
    "deep": "24 blocks, named outputs",
    "halving": "halving",
}


@dataclass(frozen=True)
class Library:
    """The call that is compared, and the policies that it is given."""

    name: str
    checkpoint: Callable[..., Any]
    policies: Any


LIBRARIES = (
    Library("jax", jax.checkpoint, jax.checkpoint_policies),
    Library("remat", remat.checkpoint, remat.policies),
)


@dataclass(frozen=True, order=True)
class Key:
    """One variant of a model: a way to checkpoint it and the library that does."""

    way: str
    """A key of `TITLES`, or empty where nothing is checkpointed.

    (a) The whole loss is, and the outputs of blocks that have a name are saved; (b) the
    whole loss is, and products without batch dimensions are saved; (c) each block is,
    by itself and without a policy; loop: see `loop_problem`; deep: as (a), with more
    blocks; halving: see `halving_problem`.
    """
    library: str


@dataclass(frozen=True)
class Problem:
    """A loss, its arguments, and the variants of it that are measured."""

    title: str
    arguments: tuple[Any, ...]
    make_loss: Mapping[Key, Callable[[], Callable[..., Array]]]
    """Each returns a new function object: no trace of it is cached."""
    most_builds: int | None = None
    """Where one takes minutes, how many to make at most of each variant."""


@dataclass(frozen=True)
class Figures:
    """What was measured of one variant."""

    temp_bytes: int
    flops: float
    builds: list[BuildTime]
    step_seconds: list[float]
    """One call in each round."""

    @property
    def lower_seconds(self) -> list[float]:
        return [time.lower_seconds for time in self.builds]

    @property
    def compile_seconds(self) -> list[float]:
        return [time.compile_seconds for time in self.builds]

    @property
    def total_seconds(self) -> list[float]:
        return [time.total_seconds for time in self.builds]


@dataclass(frozen=True)
class Ratios:
    """`remat.checkpoint` over `jax.checkpoint`, used in the same way.

    Ratios of times are medians over the rounds of the ratio within a round.
    """

    temp: float
    flops: float
    lower: float
    total: float
    step: float


@dataclass(frozen=True)
class Requirement:
    """A limit on a ratio of `remat.checkpoint` to `jax.checkpoint`."""

    what: str
    value: float
    limit: float
    timed: bool
    """Whether the value is one of times, which vary from run to run."""

    @property
    def met(self) -> bool:
        return self.value <= self.limit


def model_problem(
    title: str,
    config: gpt.Config | mlp.Config,
    model: Any,
) -> Problem:
    """Return the variants of a model: `model` is the module `gpt` or `mlp`."""
    params_key, batch_key = jax.random.split(jax.random.key(0))
    arguments = (model.init(params_key, config), model.make_batch(batch_key, config))

    def plain(wrap_block: Transform | None = None) -> Callable[..., Array]:
        def loss(params: Any, batch: Any) -> Array:
            return model.loss(params, batch, config, wrap_block=wrap_block)

        return loss

    make_loss: dict[Key, Callable[[], Callable[..., Array]]] = {Key("", ""): plain}
    for library in LIBRARIES:
        policies = {
            "a": library.policies.save_only_these_names(model.NAME),
            "b": library.policies.dots_with_no_batch_dims_saveable,
        }
        for way, policy in policies.items():
            transform = functools.partial(library.checkpoint, policy=policy)
            make_loss[Key(way, library.name)] = lambda transform=transform: transform(
                plain()
            )
        make_loss[Key("c", library.name)] = functools.partial(plain, library.checkpoint)
    # Neighbours run one after the other: first none, then both libraries in each way.
    return Problem(title, arguments, dict(sorted(make_loss.items())))


def loop_problem(config: gpt.Config) -> Problem:
    """Return the GPT with its blocks in a `lax.scan`.

    `remat.checkpoint` is put around the whole loss, with the outputs of blocks saved by
    name; `jax.checkpoint` around the body of the loop, as it is written by hand.
    """
    params_key, batch_key = jax.random.split(jax.random.key(0))
    params = gpt.stacked(gpt.init(params_key, config))

    def plain(wrap_block: Transform | None = None) -> Callable[..., Array]:
        def loss(params: Any, batch: Any) -> Array:
            return gpt.loss(params, batch, config, wrap_block=wrap_block)

        return loss

    policy = remat.policies.save_only_these_names(gpt.NAME)
    return Problem(
        "GPT, blocks in a scan",
        (params, gpt.make_batch(batch_key, config)),
        {
            Key("", ""): plain,
            Key("loop", "jax"): lambda: plain(jax.checkpoint),
            Key("loop", "remat"): lambda: remat.checkpoint(plain(), policy=policy),
        },
    )


def deep_problem(config: gpt.Config) -> Problem:
    """Return way (a) of a GPT with many blocks, to see what building it costs."""
    whole = model_problem(f"GPT, {config.blocks} blocks", config, gpt)
    return Problem(
        whole.title,
        whole.arguments,
        {
            Key("deep", library.name): whole.make_loss[Key("a", library.name)]
            for library in LIBRARIES
        },
        most_builds=1,
    )


def halving_problem(functions: int, size: int) -> Problem:
    """Return the recursive scheme of the JAX documentation, nested in halves.

    Args:
        functions: how many functions are composed.
        size: elements of the f32 vector that goes through them.
    """

    def halve(funs: list[Callable[..., Array]], transform: Transform):
        if len(funs) == 1:
            return funs[0]
        middle = len(funs) // 2
        first = halve(funs[:middle], transform)
        second = halve(funs[middle:], transform)
        return lambda x: second(transform(first)(x))

    def scheme(transform: Transform) -> Callable[[Array], Array]:
        composed = halve([jnp.sin] * functions, transform)
        return lambda x: jnp.sum(composed(x))

    return Problem(
        f"Halving, {functions} functions",
        (jnp.linspace(0, 1, size),),
        {
            Key("halving", library.name): functools.partial(scheme, library.checkpoint)
            for library in LIBRARIES
        },
    )


def measure(
    problem: Problem, repeats: int, steps: int, progress: Progress
) -> dict[Key, Figures]:
    """Return the figures of every variant.

    Args:
        problem: the variants.
        repeats: builds of each variant. One more, before them and not counted, makes
            sure that none pays for what is imported and set up once per process.
        steps: calls of each executable. One more, not counted, warms it up.
        progress: shows what runs.

    Raises:
        RuntimeError: if a variant's loss or gradients differ from the first one's.
    """
    keys = list(problem.make_loss)
    repeats = min(repeats, problem.most_builds or repeats)
    task = progress.add_task(
        problem.title, total=(repeats + 1 + steps + 1) * len(keys), now=""
    )
    builds: dict[Key, list[BuildTime]] = {key: [] for key in keys}
    latest = {}
    for number, order in enumerate(rounds(keys, repeats + 1)):
        for key in order:
            progress.update(task, now=f"building {describe(key)}", advance=1)
            latest[key] = build(problem.make_loss[key](), problem.arguments)
            if number:
                builds[key].append(latest[key].time)
    expected = None
    for key in keys:
        progress.update(task, now=f"comparing {describe(key)}", advance=1)
        results = latest[key].compiled(*problem.arguments)
        expected = results if expected is None else expected
        require_equal(results, expected, f"{problem.title}, {describe(key)}")
    seconds: dict[Key, list[float]] = {key: [] for key in keys}
    for order in rounds(keys, steps):
        for key in order:
            progress.update(task, now=f"timing {describe(key)}", advance=1)
            seconds[key].append(call_seconds(latest[key].compiled, problem.arguments))
    progress.update(task, now="")
    return {
        key: Figures(
            latest[key].temp_bytes, latest[key].flops, builds[key], seconds[key]
        )
        for key in keys
    }


def require_equal(results: Any, expected: Any, what: str) -> None:
    """Raise unless all leaves agree to 0.1 % of the largest entry of the leaf."""
    for leaf, wanted in zip(
        jax.tree.leaves(results), jax.tree.leaves(expected), strict=True
    ):
        error = float(jnp.max(jnp.abs(leaf - wanted)))
        # Written so that a NaN raises too.
        if not error <= 1e-3 * float(jnp.max(jnp.abs(wanted))):
            raise RuntimeError(
                f"{what}: a result of shape {leaf.shape} is off by up to {error:.3g}. "
                "Figures of a wrong program mean nothing, so the benchmark ends here."
            )


def compare(figures: Mapping[Key, Figures]) -> dict[str, Ratios]:
    """Return the ratios of the two libraries for each way of checkpointing."""
    ratios: dict[str, Ratios] = {}
    for way in TITLES:
        if Key(way, "remat") in figures:
            ours, theirs = figures[Key(way, "remat")], figures[Key(way, "jax")]
            ratios[way] = Ratios(
                temp=ours.temp_bytes / theirs.temp_bytes,
                flops=ours.flops / theirs.flops,
                lower=paired_ratio(ours.lower_seconds, theirs.lower_seconds),
                total=paired_ratio(ours.total_seconds, theirs.total_seconds),
                step=paired_ratio(ours.step_seconds, theirs.step_seconds),
            )
    return ratios


def requirements(ratios: Mapping[str, Mapping[str, Ratios]]) -> list[Requirement]:
    """Return the requirements on the problems in `ratios`: keys of it, then ways."""
    memory = {
        ("GPT", "a", "temp"): 0.20,
        ("GPT", "a", "flops"): 1.02,
        ("GPT", "b", "temp"): 0.34,
        ("GPT", "c", "temp"): 1.00,
        ("MLP", "a", "temp"): 0.30,
        ("MLP", "c", "temp"): 1.00,
        ("loop", "loop", "temp"): 1.00,
    }
    required = [
        Requirement(
            f"{titled(name, way)}: {field}",
            getattr(ratios[name][way], field),
            limit,
            timed=False,
        )
        for (name, way, field), limit in memory.items()
        if name in ratios
    ]
    for name, ways in ratios.items():
        for way, ratio in ways.items():
            times = {
                "lower": (ratio.lower, 1.5),
                "lower + compile": (ratio.total, 1.0),
            }
            if way == "loop":  # the two are not the same program
                times = {}
            if way != "halving":
                times["step"] = (ratio.step, 1.05)
            required += [
                Requirement(f"{titled(name, way)}: {what}", value, limit, timed=True)
                for what, (value, limit) in times.items()
            ]
    return required


def titled(name: str, way: str) -> str:
    """Return which variants of which model are compared, in words."""
    return f"{name} {TITLES[way]}" if name in ("GPT", "MLP") else TITLES[way]


def describe(key: Key) -> str:
    """Return the variant in words."""
    if not key.way:
        return NO_REMAT
    return f"{key.library}.checkpoint {TITLES[key.way]}"


def figures_table(title: str, figures: Mapping[Key, Figures]) -> Table:
    """Return the absolute figures, times as medians."""
    table = Table("variant", "of", title=title, title_justify="left")
    for column in ("temp MiB", "GFLOP", "lower s", "compile s", "step s"):
        table.add_column(column, justify="right")
    for key, figure in figures.items():
        table.add_row(
            TITLES.get(key.way, NO_REMAT),
            key.library,
            f"{figure.temp_bytes / MIB:.1f}",
            f"{figure.flops / 1e9:.1f}",
            f"{statistics.median(figure.lower_seconds):.2f}",
            f"{statistics.median(figure.compile_seconds):.2f}",
            f"{statistics.median(figure.step_seconds):.3f}",
        )
    return table


def ratios_table(ratios: Mapping[str, Ratios]) -> Table:
    """Return the ratios of `remat.checkpoint` to `jax.checkpoint`."""
    table = Table("remat / jax", title_justify="left")
    for column in ("temp", "GFLOP", "lower", "lower + compile", "step"):
        table.add_column(column, justify="right")
    for way, ratio in ratios.items():
        values = (ratio.temp, ratio.flops, ratio.lower, ratio.total, ratio.step)
        table.add_row(TITLES[way], *(f"{value:.3f}" for value in values))
    return table


def requirements_table(required: list[Requirement]) -> Table:
    """Return each requirement with its value, its limit, and whether it is met."""
    table = Table("remat / jax", title="Required", title_justify="left")
    for column in ("value", "limit", ""):
        table.add_column(column, justify="right")
    for item in required:
        table.add_row(
            item.what,
            f"{item.value:.3f}",
            f"{item.limit:.2f}",
            "[green]ok" if item.met else "[bold red]MISSED",
        )
    return table


def as_json(
    settings: Mapping[str, Any],
    figures: Mapping[str, Mapping[Key, Figures]],
    ratios: Mapping[str, Mapping[str, Ratios]],
    required: list[Requirement],
) -> str:
    """Return everything that was measured, the times of all rounds included."""
    return json.dumps(
        {
            "environment": environment(),
            "settings": settings,
            "figures": {
                name: [
                    {"way": key.way or NO_REMAT, "of": key.library} | asdict(figure)
                    for key, figure in variants.items()
                ]
                for name, variants in figures.items()
            },
            "ratios": {
                name: {way: asdict(ratio) for way, ratio in ways.items()}
                for name, ways in ratios.items()
            },
            "required": [asdict(item) | {"met": item.met} for item in required],
        },
        indent=1,
    )


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """Show on a terminal what runs; print nothing where standard error is none."""
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:3], TimeElapsedColumn())
    with Progress(
        *columns,
        TextColumn("{task.fields[now]}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        yield progress


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description="Measure remat.checkpoint against jax.checkpoint."
    )
    parser.add_argument(
        "--model",
        choices=("mlp", "gpt", "loop", "deep", "halving"),
        action="append",
        help="measure only this; may be repeated",
    )
    parser.add_argument(
        "--repeats", type=int, help="builds of each variant (default: 5; quick: 1)"
    )
    parser.add_argument(
        "--steps", type=int, help="steps of each variant (default: 9; quick: 3)"
    )
    parser.add_argument("--quick", action="store_true", help="small models")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit with 1 if a requirement on memory or FLOPs is missed",
    )
    options = parser.parse_args()
    if options.repeats is None:
        options.repeats = 1 if options.quick else 5
    if options.steps is None:
        options.steps = 3 if options.quick else 9
    if options.repeats < 1 or options.steps < 1:
        parser.error("--repeats and --steps take a number of at least 1")
    return options


def main() -> int:
    """Measure, print, and return the exit status."""
    options = parse_arguments()
    # A compilation served from a cache on disk would be timed as one.
    jax.config.update("jax_enable_compilation_cache", False)
    quick = options.quick
    gpt_config = (
        gpt.Config(width=128, length=128, batch=4, vocabulary=256)
        if quick
        else gpt.Config()
    )
    # Building takes as long for small arrays as for large ones.
    deep_config = gpt.Config(blocks=24, width=64, length=64, batch=2, vocabulary=256)
    mlp_config = mlp.Config(width=64, batch=256) if quick else mlp.Config()
    makers: dict[str, Callable[[], Problem]] = {
        "MLP": lambda: model_problem("MLP", mlp_config, mlp),
        "GPT": lambda: model_problem("GPT", gpt_config, gpt),
        "loop": lambda: loop_problem(gpt_config),
        "deep": lambda: deep_problem(deep_config),
        "halving": lambda: halving_problem(64, 2**12 if quick else 2**18),
    }
    # In a pipe a table that is also valid Markdown, without escapes.
    console = Console()
    table_box = box.SIMPLE_HEAD if console.is_terminal else box.MARKDOWN

    def show(table: Table) -> None:
        table.box = table_box
        console.print(table)

    figures: dict[str, dict[Key, Figures]] = {}
    ratios: dict[str, dict[str, Ratios]] = {}
    console.print(", ".join(f"{k} {v}" for k, v in environment().items() if v))
    for name, make in makers.items():
        if options.model and name.lower() not in options.model:
            continue
        problem = make()
        with shown_progress() as progress:
            figures[name] = measure(problem, options.repeats, options.steps, progress)
        ratios[name] = compare(figures[name])
        show(figures_table(problem.title, figures[name]))
        show(ratios_table(ratios[name]))
    required = requirements(ratios)
    show(requirements_table(required))
    if quick:
        console.print("The limits are meant for the full sizes, these are the small.")
    if options.json:
        settings = {
            "repeats": options.repeats,
            "steps": options.steps,
            "GPT": asdict(gpt_config),
            "MLP": asdict(mlp_config),
            "deep": asdict(deep_config),
        }
        options.json.write_text(as_json(settings, figures, ratios, required) + "\n")
    missed = any(not item.met and not item.timed for item in required)
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
