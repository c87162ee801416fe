"""Train a small GPT three times: without remat, with JAX's, and with this library's.

The text is the source code of Python's own standard library, one token per byte. All
three start at the same parameters and see the same batches, so that their losses are
the same; what differs is the memory that the compiled training step needs, and its
time.
"""

import argparse
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# Run as a script, only this folder is on the path, not the root of the repository,
# from which the model of the benchmarks is imported.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.stages import Compiled
from rich import box
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import remat
from benchmarks.models import gpt

MIB = 2**20
TEXT_BYTES = 4 * MIB
LEARNING_RATE = 1e-3
# Recomputed values are rounded like the saved ones or in the last bits otherwise, by
# what XLA fuses; each step of Adam may double such a difference.
LOSS_TOLERANCE = 1e-3

Loss = Callable[[gpt.Params, gpt.Batch], Array]


class State(NamedTuple):
    """What a training step reads and replaces."""

    params: gpt.Params
    mean: gpt.Params
    """Running mean of the gradients."""
    square: gpt.Params
    """Running mean of their squares."""
    step: Array
    """Steps taken, a scalar i32."""


@dataclass
class Run:
    """One of the three trainings."""

    title: str
    compiled: Compiled
    state: State
    losses: list[float] = field(default_factory=list)
    """Of each step's batch before the step, in nats per byte."""
    seconds: list[float] = field(default_factory=list)

    @property
    def temp_bytes(self) -> int:
        """Bytes that the step needs besides its arguments and results."""
        return memory(self.compiled).temp_size_in_bytes

    @property
    def argument_bytes(self) -> int:
        """Bytes of arguments and results; donated ones share their buffers."""
        analysis = memory(self.compiled)
        return (
            analysis.argument_size_in_bytes
            + analysis.output_size_in_bytes
            - analysis.alias_size_in_bytes
        )


def memory(compiled: Compiled) -> Any:
    """Return XLA's memory analysis."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise SystemExit(f"{jax.default_backend()} reports no memory analysis.")
    return analysis


def read_text() -> np.ndarray:
    """Return source code of the standard library, `[bytes]` u8."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    if not text:
        raise SystemExit(
            f"{folder} holds no Python source to train on. Use a Python that comes "
            "with the source code of its standard library."
        )
    return np.frombuffer(bytes(text[:TEXT_BYTES]), dtype=np.uint8)


def batches(text: np.ndarray, config: gpt.Config, seed: int) -> Iterator[gpt.Batch]:
    """Yield random windows of the text, forever the same for the same seed."""
    generator = np.random.default_rng(seed)
    window = np.arange(config.length + 1)
    while True:
        starts = generator.integers(len(text) - config.length, size=config.batch)
        tokens = jnp.asarray(text[starts[:, None] + window], dtype=jnp.int32)
        yield tokens[:, :-1], tokens[:, 1:]


def initial_state(config: gpt.Config) -> State:
    """Return the same state at every call, in buffers of its own."""
    params = gpt.init(jax.random.key(0), config)
    zeros = [jax.tree.map(jnp.zeros_like, params) for _ in range(2)]
    return State(params, *zeros, step=jnp.zeros((), dtype=jnp.int32))


def training_step(loss: Loss) -> Callable[[State, gpt.Batch], tuple[State, Array]]:
    """Return a step of Adam (Kingma and Ba, 2015, algorithm 1) on `loss`."""

    def step(state: State, batch: gpt.Batch) -> tuple[State, Array]:
        value, gradient = jax.value_and_grad(loss)(state.params, batch)
        count = state.step + 1
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mean, gradient)
        square = jax.tree.map(
            lambda s, g: 0.99 * s + 0.01 * g**2, state.square, gradient
        )
        params = jax.tree.map(
            lambda p, m, s: (
                p
                - LEARNING_RATE
                * (m / (1 - 0.9**count))
                / (jnp.sqrt(s / (1 - 0.99**count)) + 1e-8)
            ),
            state.params,
            mean,
            square,
        )
        return State(params, mean, square, count), value

    return step


def prepare(title: str, loss: Loss, config: gpt.Config) -> Run:
    """Return a run with its step compiled and no step taken."""
    state = initial_state(config)
    tokens = jax.ShapeDtypeStruct((config.batch, config.length), jnp.int32)
    step = jax.jit(training_step(loss), donate_argnums=0)
    return Run(title, step.lower(state, (tokens, tokens)).compile(), state)


def advance(run: Run, batch: gpt.Batch) -> None:
    """Take one step."""
    start = time.perf_counter()
    run.state, loss = jax.block_until_ready(run.compiled(run.state, batch))
    run.seconds.append(time.perf_counter() - start)
    run.losses.append(float(loss))


def largest_difference(runs: list[Run]) -> float:
    """Return the largest relative difference of a loss to the first run's."""
    return max(
        # Python's max() passes over a NaN.
        math.inf if math.isnan(loss) else abs(loss - wanted) / abs(wanted)
        for run in runs
        for loss, wanted in zip(run.losses, runs[0].losses, strict=True)
    )


def results_table(runs: list[Run]) -> Table:
    """Return a row for each run; the ratios are of `temp`, losses in nats per byte."""
    none, theirs, _ = runs
    table = Table("variant")
    losses = ("loss 1", f"loss {len(none.losses)}")
    for column in ("temp MiB", "of none", "of jax", "step s", *losses):
        table.add_column(column, justify="right")
    for run in runs:
        table.add_row(
            run.title,
            f"{run.temp_bytes / MIB:.1f}",
            f"{run.temp_bytes / none.temp_bytes:.2f}",
            f"{run.temp_bytes / theirs.temp_bytes:.2f}",
            f"{statistics.median(run.seconds):.3f}",
            f"{run.losses[0]:.4f}",
            f"{run.losses[-1]:.4f}",
        )
    return table


class Reporter:
    """Shows how far the work is: a bar on a terminal, a few lines elsewhere."""

    def __init__(self, console: Console, total: int):
        columns = (*Progress.get_default_columns()[:3], TimeElapsedColumn())
        self._progress = Progress(
            *columns,
            TextColumn("{task.fields[now]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("training", total=total, now="")
        self._console = console

    @contextmanager
    def shown(self) -> Iterator[None]:
        with self._progress:
            yield

    def report(self, now: str, *, advance: int = 0, line: bool = False) -> None:
        """Show `now`; `line` says that it is also worth a line outside a terminal."""
        self._progress.update(self._task, now=now, advance=advance)
        if line and not self._console.is_terminal:
            self._console.print(now, highlight=False)


def train(config: gpt.Config, steps: int, console: Console) -> list[Run]:
    """Return the three runs after all their steps."""

    def loss(params: gpt.Params, batch: gpt.Batch) -> Array:
        return gpt.loss(params, batch, config)

    jax_policy = jax.checkpoint_policies.save_only_these_names(gpt.NAME)
    remat_policy = remat.policies.save_only_these_names(gpt.NAME)
    losses: dict[str, Loss] = {
        "no remat": loss,
        "jax.checkpoint": jax.checkpoint(loss, policy=jax_policy),
        "remat.checkpoint": remat.checkpoint(loss, policy=remat_policy),
    }
    reporter = Reporter(console, total=len(losses) * steps)
    with reporter.shown():
        runs: list[Run] = []
        for title, variant in losses.items():
            reporter.report(f"compiling: {title}", line=True)
            runs.append(prepare(title, variant, config))
        data = batches(read_text(), config, seed=0)
        for number, batch in zip(range(steps), data, strict=False):
            # One step of each in turn, so that all three meet the same load of the
            # machine, and each of them at every place of the round.
            for place in range(len(runs)):
                run = runs[(number + place) % len(runs)]
                advance(run, batch)
                now = f"{run.title}, step {number + 1}, loss {run.losses[-1]:.3f}"
                reporter.report(now, advance=1)
            if number % 10 == 0 or number == steps - 1:
                values = ", ".join(f"{run.losses[-1]:.4f}" for run in runs)
                reporter.report(f"step {number + 1}: loss {values}", line=True)
    return runs


def main() -> int:
    """Train, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(
        description="Train a small GPT with and without rematerialization."
    )
    parser.add_argument("--steps", type=int, help="steps of each training")
    parser.add_argument("--quick", action="store_true", help="a tiny model, few steps")
    options = parser.parse_args()
    if options.quick:
        config = gpt.Config(blocks=4, width=64, length=64, batch=4, vocabulary=256)
    else:
        config = gpt.Config(blocks=8, width=128, length=128, batch=8, vocabulary=256)
    steps = options.steps if options.steps is not None else 4 if options.quick else 30
    if steps < 1:
        parser.error("--steps takes a number of at least 1")

    console = Console()
    runs = train(config, steps, console)
    table = results_table(runs)
    # In a pipe a table that is also valid Markdown, without escapes.
    table.box = box.SIMPLE_HEAD if console.is_terminal else box.MARKDOWN
    console.print(table)
    console.print(
        "temp is what the compiled training step needs besides its arguments and "
        f"results, which take {runs[0].argument_bytes / MIB:.1f} MiB in each variant.",
        highlight=False,
    )
    difference = largest_difference(runs)
    if difference > LOSS_TOLERANCE:
        console.print(
            f"The losses of the three trainings differ by up to {difference:.1e} of "
            f"their value, more than the {LOSS_TOLERANCE:.0e} that rounding explains.",
            style="bold red",
            highlight=False,
        )
        return 1
    console.print(
        f"The losses of all three agree at each of the {steps} steps: they differ by "
        f"at most {difference:.1e} of their value, which is rounding.",
        highlight=False,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
