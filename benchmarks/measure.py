"""Memory, work and time of compiled functions."""

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax.stages import Compiled

Key = TypeVar("Key", bound=Hashable)

MIB = 2**20


@dataclass(frozen=True)
class BuildTime:
    """What one build of an executable took."""

    lower_seconds: float
    """Tracing, transforming and lowering to StableHLO."""
    compile_seconds: float

    @property
    def total_seconds(self) -> float:
        return self.lower_seconds + self.compile_seconds


@dataclass(frozen=True)
class Build:
    """An executable and what its build took."""

    compiled: Compiled
    time: BuildTime

    @property
    def temp_bytes(self) -> int:
        """Bytes of the buffers besides arguments and outputs, as XLA assigned them."""
        analysis = self.compiled.memory_analysis()
        if analysis is None:
            raise RuntimeError(
                f"The backend {jax.default_backend()!r} reports no memory analysis, "
                "which this benchmark reads. Run it on CPU, GPU or TPU."
            )
        return analysis.temp_size_in_bytes

    @property
    def flops(self) -> float:
        """Floating-point operations of one call, by XLA's own cost analysis."""
        analysis = self.compiled.cost_analysis()
        return 0.0 if analysis is None else analysis["flops"]


def build(fun: Callable[..., Any], arguments: Sequence[Any]) -> Build:
    """Return the executable of `jit(value_and_grad(fun))`, built without any cache.

    Args:
        fun: a scalar function, a function object that was never traced.
        arguments: arrays or `jax.ShapeDtypeStruct`s.
    """
    jax.clear_caches()
    # Otherwise the garbage of the last build is collected at the expense of this one.
    gc.collect()
    start = time.perf_counter()
    lowered = jax.jit(jax.value_and_grad(fun)).lower(*arguments)
    middle = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter()
    return Build(compiled, BuildTime(middle - start, end - middle))


def rounds(keys: Iterable[Key], count: int) -> Iterator[list[Key]]:
    """Yield the keys `count` times, every other time in reverse order.

    So neither of two neighbours always runs after the other, and a drift of the
    machine's speed reaches both alike.
    """
    order = list(keys)
    for _ in range(count):
        yield order
        order = order[::-1]


def call_seconds(compiled: Compiled, arguments: Sequence[Any]) -> float:
    """Return the seconds of one call, all results computed."""
    start = time.perf_counter()
    jax.block_until_ready(compiled(*arguments))
    return time.perf_counter() - start


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the median over the rounds of the ratio within one round."""
    return statistics.median(
        n / d for n, d in zip(numerators, denominators, strict=True)
    )


def environment() -> Mapping[str, str | int]:
    """Return what the figures depend on besides the code."""
    device = jax.devices()[0]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "python": platform.python_version(),
        "device": device.device_kind if device.platform != "cpu" else _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # Linux alone has this file.
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if "model name" in line)
    return next(names, platform.machine())
