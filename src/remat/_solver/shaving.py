"""Peak shaving: cut at the peak, evaluate again what was cut, until all is in budget.

Each round cuts at the highest step, at the smallest price that brings it under the
budget. What the cut gives up is evaluated again right before its first use after that
step, and is an evaluation like all others for the rounds that follow: a value may be
made many times. Each round's schedule is one for a looser budget, so that a run for
the tightest budget passes by the others.
"""

from collections.abc import Iterator

import numpy as np

from remat._program import Program
from remat._simulate import Simulation, simulate
from remat._solver.min_cut import Cut, across

_ROUNDS = 200
_PRICES = 14


def shave(
    start: Simulation, budget_bytes: int, *, later: float
) -> Iterator[Simulation]:
    """Schedules with less and less memory; the last is in budget if any is.

    Args:
        start: where to start from.
        budget_bytes: what the peak should come under.
        later: how much more a byte is worth that isn't read for the whole rest of the
            schedule than one read at once, as a fraction of the latter. Among layers
            that are alike it gives up first those that are missed longest.
    """
    sim, price = start, None
    limit = 6 * max(sim.program.total_cost, 1e-300)
    for _ in range(_ROUNDS):
        if sim.peak_bytes <= budget_bytes:
            return
        step = sim.peak_step
        found = _cheapest(sim, step, budget_bytes, later, price)
        if found is None:
            return
        cut, price = found
        following = live_only(sim.program, with_repeats(sim, step, cut.again))
        if following.schedule == sim.schedule or following.recompute_cost > limit:
            return
        sim = following
        yield sim


def _cheapest(
    sim: Simulation, step: int, budget_bytes: int, later: float, guess: float | None
) -> tuple[Cut, float] | None:
    """The cut at the smallest price found that is in budget, and that price."""
    network = across(sim, step)
    if not len(network) or network.fixed_bytes > budget_bytes:
        return None
    weight = _weights(sim, step, later)
    held = max(int(sim.live_bytes[step]), 1)
    price = guess or max(network.total_cost, 1e-12) / held
    low, high, best = 0.0, None, None
    for _ in range(_PRICES):
        cut = network.cut(price, weight)
        if cut.held_bytes <= budget_bytes:
            best, high = (cut, price), price
        else:
            low = price
        if high is None:
            price *= 8
        elif low == 0:
            price /= 8
        elif high < 1.03 * low:
            break
        else:
            price = (low * high) ** 0.5
    return best


def _weights(sim: Simulation, step: int, later: float) -> np.ndarray:
    """For each version, what a byte of it is worth, by its next use after `step`."""
    following = np.full(len(sim.version_bytes), len(sim.schedule))
    for k in range(len(sim.schedule) - 1, step, -1):
        following[list(sim.reads[k])] = k
    rest = max(len(sim.schedule) - step, 1)
    return 1 + later * np.maximum(following - step, 0) / rest


def with_repeats(sim: Simulation, step: int, again: frozenset[int]) -> list[int]:
    """The schedule that evaluates `again` after `step`, each before its first use."""
    schedule = list(sim.schedule[: step + 1])
    here = set(sim.reads[step])
    done: set[int] = set()

    def missing(version: int) -> bool:
        return (
            int(made_at[version]) in again
            and int(made_at[version]) not in done
            and version not in here
            and sizes[version] > 0
        )

    made_at, sizes = sim.made_at, sim.version_bytes
    for k in range(step + 1, len(sim.schedule)):
        stack = [int(made_at[v]) for v in sim.reads[k] if missing(v)]
        while stack:
            top = stack[-1]
            if top in done:
                stack.pop()
                continue
            before = [int(made_at[u]) for u in sim.reads[top] if missing(u)]
            if before:
                stack.extend(reversed(before))
            else:
                schedule.append(sim.schedule[stack.pop()])
                done.add(top)
        schedule.append(sim.schedule[k])
    return schedule


def live_only(program: Program, schedule: list[int]) -> Simulation:
    """`schedule` without the evaluations whose results nothing reads."""
    sim = simulate(program, schedule)
    used = np.zeros(len(sim.version_bytes), bool)
    used[sim.last_use == len(schedule)] = True
    kept = []
    for k in range(len(schedule) - 1, -1, -1):
        if not program.repeatable[schedule[k]] or used[list(sim.made_by(k))].any():
            kept.append(schedule[k])
            used[list(sim.reads[k])] = True
    if len(kept) == len(schedule):
        return sim
    return simulate(program, kept[::-1])
