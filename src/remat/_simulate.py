"""What a schedule takes: the judge of every plan, whoever made it.

A schedule is a sequence of equations of a program, some more than once. An equation
reads the latest version of each value. A version is held from when it is made to its
last read, one of a result to the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from remat._errors import InvalidScheduleError
from remat._program import Program


@dataclass(frozen=True, eq=False)
class Simulation:
    """The memory of a schedule, step by step.

    Attributes:
        program: the program.
        schedule: the equation of each step.
        reads: for each step, the versions it reads, without repetition.
        first_version: for each step, the number of the first version it makes; they
            count up in order of the steps. One more entry at the end.
        version_bytes: for each version, its size.
        made_at: for each version, the step that makes it.
        last_use: for each version, the last step that reads it; the step that makes it
            if none does, one past the last step for a result.
        live_bytes: for each step, what is held while it is evaluated: all that was made
            and is read there or later, what it makes, and its workspace.
    """

    program: Program
    schedule: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    first_version: np.ndarray
    version_bytes: np.ndarray
    made_at: np.ndarray
    last_use: np.ndarray
    live_bytes: np.ndarray

    @property
    def peak_bytes(self) -> int:
        """The most that is held at any step."""
        return int(self.live_bytes.max(initial=0))

    @property
    def peak_step(self) -> int:
        """The first step at which that is so."""
        return int(self.live_bytes.argmax()) if len(self.schedule) else 0

    @cached_property
    def evaluations(self) -> np.ndarray:
        """For each equation, how many times it is evaluated."""
        return np.bincount(self.schedule, minlength=len(self.program))

    @cached_property
    def recompute_cost(self) -> float:
        """What the schedule costs more than evaluating every equation once."""
        costs = np.asarray(self.program.costs, float)
        return float(np.dot(np.maximum(self.evaluations - 1, 0), costs))

    @property
    def recompute_fraction(self) -> float:
        """That, as a fraction of the cost of the program."""
        total = self.program.total_cost
        return self.recompute_cost / total if total else 0.0

    def made_by(self, step: int) -> range:
        """The versions that `step` makes."""
        return range(int(self.first_version[step]), int(self.first_version[step + 1]))


def simulate(program: Program, schedule: Sequence[int]) -> Simulation:
    """What `program` takes when its equations are evaluated in the order `schedule`.

    Args:
        program: the program.
        schedule: numbers of equations. Each that a result needs has to be there, and
            every one that may not be repeated exactly once.

    Raises:
        InvalidScheduleError: something is read before it is made, is missing at the
            end, or is evaluated again that may not be.
    """
    latest: dict[int, int] = {}
    reads: list[tuple[int, ...]] = []
    first = np.zeros(len(schedule) + 1, np.int64)
    sizes: list[int] = []
    made_at: list[int] = []
    last_use: list[int] = []
    once: set[int] = set()
    steps = [int(i) for i in schedule]
    for step, equation in enumerate(steps):
        if not 0 <= equation < len(program):
            raise InvalidScheduleError(
                f"Step {step} of the schedule evaluates equation {equation}; the "
                f"program has equations 0 to {len(program) - 1}."
            )
        if not program.repeatable[equation]:
            if equation in once:
                raise InvalidScheduleError(
                    f"Step {step} evaluates equation {program.names[equation]} again, "
                    "which may not be repeated."
                )
            once.add(equation)
        try:
            versions = [latest[value] for value in program.reads[equation]]
        except KeyError as error:
            raise InvalidScheduleError(
                f"Step {step}, equation {program.names[equation]}, reads value "
                f"{error.args[0]}, which no step before it makes."
            ) from None
        for version in versions:
            last_use[version] = step
        reads.append(tuple(dict.fromkeys(versions)))
        for value in program.makes[equation]:
            latest[value] = len(sizes)
            sizes.append(program.value_bytes[value])
            made_at.append(step)
            last_use.append(step)
        first[step + 1] = len(sizes)
    for value in program.results:
        if value not in latest:
            raise InvalidScheduleError(f"No step makes the result {value}.")
        last_use[latest[value]] = len(steps)
    left = sum(not again for again in program.repeatable) - len(once)
    if left:
        raise InvalidScheduleError(
            f"{left} equations that have to be evaluated once are not in the schedule."
        )
    version_bytes = np.asarray(sizes, np.int64)
    changes = np.zeros(len(steps) + 2, np.int64)
    np.add.at(changes, np.asarray(made_at, np.int64), version_bytes)
    np.subtract.at(changes, np.asarray(last_use, np.int64) + 1, version_bytes)
    live = np.cumsum(changes)[: len(steps)]
    if len(steps):
        live = live + np.asarray(program.workspace_bytes, np.int64)[steps]
    return Simulation(
        program=program,
        schedule=tuple(steps),
        reads=tuple(reads),
        first_version=first,
        version_bytes=version_bytes,
        made_at=np.asarray(made_at, np.int64),
        last_use=np.asarray(last_use, np.int64),
        live_bytes=live,
    )
