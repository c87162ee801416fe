"""Local search on retention: fill what a budget leaves free with values kept longer.

A value is retained from each evaluation to the last read before the next. Dropping an
evaluation joins two of these intervals: the value is kept over the gap. Each is dropped
whose gap fits the budget, the one that saves most cost per byte and step first. The
view is that of Bartan et al., "Moccasin" (2023).
"""

from bisect import bisect_left
from itertools import pairwise

import numpy as np

from remat._simulate import Simulation
from remat._solver.shaving import live_only


def fill(sim: Simulation, budget_bytes: int) -> Simulation:
    """`sim` with evaluations dropped that its budget has no need for."""
    while True:
        dropped = _drop(sim, budget_bytes)
        if not dropped:
            return sim
        schedule = [e for k, e in enumerate(sim.schedule) if k not in dropped]
        sim = live_only(sim.program, schedule)


def _drop(sim: Simulation, budget_bytes: int) -> set[int]:
    program, sizes = sim.program, sim.version_bytes
    uses: list[list[int]] = [[] for _ in range(len(sizes))]
    for k, reads in enumerate(sim.reads):
        for v in reads:
            uses[v].append(k)
    for v in np.flatnonzero(sim.last_use == len(sim.schedule)):
        uses[v].append(len(sim.schedule))
    steps_of: dict[int, list[int]] = {}
    for k, equation in enumerate(sim.schedule):
        steps_of.setdefault(equation, []).append(k)
    live = np.append(sim.live_bytes, 0)

    def end(version: int) -> int:
        return uses[version][-1] if uses[version] else int(sim.made_at[version])

    def gap(k: int, previous: int) -> list[tuple[int, int, int]]:
        """What dropping step k holds more and less: (first, last, bytes)."""
        changes = []
        for old, new in zip(sim.made_by(previous), sim.made_by(k), strict=True):
            if not uses[new]:
                changes.append((k, k, -int(sizes[new])))
            elif end(old) + 1 < k:
                changes.append((end(old) + 1, k - 1, int(sizes[new])))
        for u in sim.reads[k]:
            if uses[u] and uses[u][-1] == k:
                before = uses[u][-2] if len(uses[u]) > 1 else int(sim.made_at[u])
                changes.append((before + 1, k, -int(sizes[u])))
        return changes

    candidates = []
    for steps in steps_of.values():
        for previous, k in pairwise(steps):
            room = sum(n * (b - a + 1) for a, b, n in gap(k, previous) if n > 0)
            cost = program.costs[sim.schedule[k]]
            candidates.append((-cost / max(room, 1), k))
    dropped: set[int] = set()
    for _, k in sorted(candidates):
        steps = steps_of[sim.schedule[k]]
        previous = steps[bisect_left(steps, k) - 1]
        changes = gap(k, previous)
        for a, b, n in changes:
            live[a : b + 1] += n
        if any(n > 0 and live[a : b + 1].max() > budget_bytes for a, b, n in changes):
            for a, b, n in changes:
                live[a : b + 1] -= n
            continue
        dropped.add(k)
        steps.remove(k)
        for old, new in zip(sim.made_by(previous), sim.made_by(k), strict=True):
            uses[old] += uses[new]
        for u in sim.reads[k]:
            uses[u].remove(k)
    return dropped
