"""What to keep across one step, at a price per byte: a minimum cut.

Across the step p, each version made before it and read after it is either kept, which
costs its bytes times the price, or made again after p, which costs its equation and
needs what that reads. With need(v): v has to be there after p, and again(k): the step k
is evaluated again, the cheapest choice is the minimum cut of

    source -> need(v), infinite, if v is read after p
    need(v) -> again(maker of v), price * bytes of v
    again(k) -> sink, cost of k
    again(k) -> need(u), infinite, for each u that k reads.

It is the cut of Jain et al., "Checkmate" (2020), section 4, in the one-gap form that
min-cut partitioners of forward and backward passes use (Zheng, "Min-cut optimal
recomputation", functorch, 2022), here for any step of any schedule.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from remat._simulate import Simulation

# Capacities are 32-bit integers to SciPy. The finite ones that lead to the sink add up
# to this at most, so that no flow overflows.
_WHOLE = 2**30


@dataclass(frozen=True, eq=False)
class Cut:
    """A choice of what to evaluate again.

    Attributes:
        again: steps to evaluate again after the step that was cut at.
        held_bytes: what is held at that step then.
    """

    again: frozenset[int]
    held_bytes: int


class Network:
    """The choices across one step, to be cut at several prices.

    Args:
        required: versions that have to be there after the step.
        reads: for each step, the versions it reads.
        makers: for each version, the step that makes it.
        sizes: for each version, its bytes.
        costs: for each step, the cost to evaluate it again; infinite if it can't be.
        free: versions that are kept at no cost.
        fixed_bytes: what is held at the step in any case.
    """

    def __init__(
        self,
        required: Iterable[int],
        reads: Sequence[Sequence[int]],
        makers: np.ndarray,
        sizes: np.ndarray,
        costs: np.ndarray,
        free: np.ndarray,
        fixed_bytes: int,
    ):
        self.fixed_bytes = fixed_bytes
        required = [v for v in dict.fromkeys(required) if not free[v]]
        need: dict[int, int] = {}  # the node of a version
        again: dict[int, int] = {}  # the node of a step
        stack, seen, count = list(required), set(required), 2
        while stack:
            v = stack.pop()
            need[v], count = count, count + 1
            step = int(makers[v])
            if step in again or not np.isfinite(costs[step]):
                continue
            again[step], count = count, count + 1
            for u in reads[step]:
                if not free[u] and u not in seen:
                    seen.add(u)
                    stack.append(u)
        self._count = count
        self._versions = np.array(list(need), np.int64)
        self._sizes = sizes[self._versions]
        self._need = np.array(list(need.values()), np.int64)
        # A version that can't be made again has nowhere to go but the sink.
        made = [again.get(int(makers[v]), 1) for v in need]
        self._made = np.array(made, np.int64)
        self._steps = np.array(list(again), np.int64)
        self._again = np.array(list(again.values()), np.int64)
        self._costs = costs[self._steps]
        self.total_cost = float(self._costs.sum())
        infinite = [
            (node, need[u]) for k, node in again.items() for u in reads[k] if u in need
        ]
        infinite += [(0, need[v]) for v in sorted(required)]
        tails, heads = np.array(infinite, np.int64).reshape(-1, 2).T
        sinks = np.ones(len(self._steps), np.int64)
        # The edges: those with a price, those with a cost, the infinite ones.
        self._tails = np.concatenate([self._need, self._again, tails], dtype=np.int32)
        self._heads = np.concatenate([self._made, sinks, heads], dtype=np.int32)
        self._infinite = np.full(len(infinite), _WHOLE - 1)

    def __len__(self) -> int:
        """How many steps could be evaluated again."""
        return len(self._steps)

    def cut(self, price: float, weight: np.ndarray | None = None) -> Cut:
        """The cheapest choice at `price` in cost per byte.

        Args:
            price: what keeping a byte costs.
            weight: for each version, a factor for its price; None for 1.
        """
        from scipy.sparse import csr_matrix
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        if not len(self._versions):
            return Cut(frozenset(), self.fixed_bytes)
        # Where all is free to evaluate again, so is any positive price too high.
        scale = _WHOLE / self.total_cost if self.total_cost else 1.0
        keep = self._sizes * (price * scale)
        if weight is not None:
            keep = keep * weight[self._versions]
        keep = np.minimum(keep, _WHOLE - 1).astype(np.int64)
        sunk = self._made == 1
        keep[sunk] = np.minimum(keep[sunk], _WHOLE // max(int(sunk.sum()), 1))
        again = np.floor(self._costs * scale).astype(np.int64)
        values = np.concatenate([keep, again, self._infinite], dtype=np.int32)
        shape = (self._count, self._count)
        graph = csr_matrix((values, (self._tails, self._heads)), shape=shape)
        flow = maximum_flow(graph, 0, 1).flow
        residual = graph - flow
        residual.data = (residual.data > 0).astype(np.int32)
        residual.eliminate_zeros()
        reached = np.zeros(self._count, bool)
        reached[breadth_first_order(residual, 0, return_predecessors=False)] = True
        kept = reached[self._need] & ~reached[self._made]
        return Cut(
            frozenset(self._steps[reached[self._again]].tolist()),
            self.fixed_bytes + int(self._sizes[kept].sum()),
        )


def across(sim: Simulation, step: int) -> Network:
    """The choices across `step` of a simulated schedule."""
    program = sim.program
    before = sim.made_at < step
    after = sim.last_use > step
    touched = np.zeros(len(sim.version_bytes), bool)
    touched[list(sim.reads[step])] = True
    touched[list(sim.made_by(step))] = True
    free = touched | (sim.version_bytes == 0)
    schedule = np.asarray(sim.schedule[:step], np.int64)
    costs = np.asarray(program.costs, float)[schedule]
    costs = np.where(np.asarray(program.repeatable)[schedule], costs, np.inf)
    costs = np.where(_only_used_later(sim, step), 0.0, costs)
    fixed = int(sim.version_bytes[touched].sum())
    fixed += program.workspace_bytes[sim.schedule[step]]
    required = np.flatnonzero(before & after & ~free).tolist()
    return Network(
        required, sim.reads, sim.made_at, sim.version_bytes, costs, free, fixed
    )


def _only_used_later(sim: Simulation, step: int) -> np.ndarray:
    """For each step before `step`, whether it may as well be postponed until after.

    It may if it is repeatable, hence pure, and what it makes is read up to `step` only
    by such steps. Evaluating it later then costs nothing: the first evaluation is dead.
    """
    later = np.zeros(step, bool)
    used = np.zeros(len(sim.version_bytes), bool)
    used[list(sim.reads[step])] = True
    for k in range(step - 1, -1, -1):
        makes = sim.made_by(k)
        zero = any(sim.version_bytes[v] == 0 and sim.last_use[v] > step for v in makes)
        repeatable = sim.program.repeatable[sim.schedule[k]]
        if repeatable and not zero and not any(used[v] for v in makes):
            later[k] = True
        else:
            used[list(sim.reads[k])] = True
    return later
