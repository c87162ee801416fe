"""Peak shaving: its schedules are valid, in budget, and cheap."""

import random

import pytest

from remat._errors import InvalidScheduleError
from remat._program import Program
from remat._simulate import Simulation, simulate
from remat._solver.retention import fill
from remat._solver.shaving import shave
from remat._units import format_bytes, parse_bytes


def chain(length: int) -> Program:
    """A chain, then its backward pass, which reads the values in reverse order."""
    reads = [[], *([i - 1] for i in range(1, length)), [length - 1]]
    reads += [[length + i - 1, length - 1 - i] for i in range(1, length)]
    return Program(
        reads=reads,
        makes=[[i] for i in range(2 * length)],
        value_bytes=[100] * (2 * length),
        costs=[1.0] * (2 * length),
        results=[2 * length - 1],
    )


def random_program(seed: int) -> Program:
    rng = random.Random(seed)
    reads, makes, sizes = [], [], []
    for _ in range(rng.randint(1, 30)):
        known = len(sizes)
        count = min(known, rng.randint(0, 3))
        reads.append([rng.randrange(known) for _ in range(count)])
        new = rng.choice([1, 1, 1, 2])
        makes.append(list(range(known, known + new)))
        sizes += [rng.choice([0, 1, 5, 20]) for _ in range(new)]
    n = len(reads)
    return Program(
        reads=reads,
        makes=makes,
        value_bytes=sizes,
        costs=[rng.choice([0.0, 1.0, 7.0]) for _ in range(n)],
        results=rng.sample(range(len(sizes)), min(2, len(sizes))),
        workspace_bytes=[rng.choice([0, 0, 3]) for _ in range(n)],
        repeatable=[rng.random() > 0.1 for _ in range(n)],
    )


def replayed_peak(program: Program, schedule: tuple[int, ...]) -> int:
    """The peak of a schedule, by asking at each step what is still read later."""

    def needed(value: int, after: int) -> bool:
        for equation in schedule[after + 1 :]:
            if value in program.reads[equation]:
                return True
            if value in program.makes[equation]:
                return False
        return value in program.results

    held: set[int] = set()
    peak = 0
    for step, equation in enumerate(schedule):
        assert held.issuperset(program.reads[equation])
        held |= set(program.makes[equation])
        size = sum(program.value_bytes[v] for v in held)
        # A version that is replaced while it is read is there twice.
        size += sum(
            program.value_bytes[v]
            for v in program.makes[equation]
            if v in program.reads[equation]
        )
        peak = max(peak, size + program.workspace_bytes[equation])
        held = {v for v in held if needed(v, step)}
    assert held.issuperset(program.results)
    return peak


def shaved(sim: Simulation, budget: int) -> list[Simulation]:
    return [*shave(sim, budget, later=0.2)]


@pytest.mark.parametrize("seed", range(60))
def test_schedules_are_valid_and_filled_within_the_budget(seed: int):
    program = random_program(seed)
    start = simulate(program, range(len(program)))
    assert start.peak_bytes == replayed_peak(program, start.schedule)
    for budget in (start.peak_bytes * 9 // 10, start.peak_bytes * 7 // 10):
        for sim in shaved(start, budget):
            assert sim.peak_bytes == replayed_peak(program, sim.schedule)
            filled = fill(sim, max(budget, sim.peak_bytes))
            assert filled.peak_bytes == replayed_peak(program, filled.schedule)
            assert filled.peak_bytes <= max(budget, sim.peak_bytes)
            assert filled.recompute_cost <= sim.recompute_cost


@pytest.mark.parametrize(("fraction", "at_most"), [(0.5, 0.3), (0.25, 0.62)])
def test_chain_fits_in_a_fraction_of_its_memory(fraction: float, at_most: float):
    start = simulate(chain(32), range(64))
    budget = int(start.peak_bytes * fraction)
    last = shaved(start, budget)[-1]
    assert last.peak_bytes <= budget
    filled = fill(last, budget)
    assert filled.peak_bytes <= budget
    assert 0 < filled.recompute_fraction <= at_most


def test_shaving_is_deterministic():
    start = simulate(chain(20), range(40))
    first, second = (shaved(start, start.peak_bytes // 3) for _ in range(2))
    assert [s.schedule for s in first] == [s.schedule for s in second]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([0, 2], "reads value 1"),
        ([0, 1, 9], "has equations 0 to 3"),
        ([0, 1], "No step makes the result 3"),
    ],
)
def test_invalid_schedule(schedule: list[int], message: str):
    with pytest.raises(InvalidScheduleError, match=message):
        simulate(chain(2), schedule)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 2**32), ("512 MB", 512 * 10**6), ("1.5e9", 1_500_000_000), ("50%", 40)],
)
def test_sizes(text: str, size: int):
    assert parse_bytes(text, whole=80) == size


@pytest.mark.parametrize("size", ["4 apples", "-1", -1, True, float("nan")])
def test_what_is_no_size(size):
    with pytest.raises(ValueError, match="size"):
        parse_bytes(size)


def test_sizes_are_shown_in_units_that_fit():
    assert [format_bytes(n) for n in (12, 1536, 2**30)] == [
        "12 B",
        "1.5 KiB",
        "1.0 GiB",
    ]
