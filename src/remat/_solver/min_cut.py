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
        cost: what evaluating them costs.
    """

    again: frozenset[int]
    held_bytes: int
    cost: float


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
        self._node: dict[int, int] = {}  # of a version
        self._step_node: dict[int, int] = {}
        count = 2
        tails: list[int] = []
        heads: list[int] = []
        stack = [v for v in dict.fromkeys(required) if not free[v]]
        seen = set(stack)
        starts = frozenset(stack)
        finite = np.isfinite(costs)
        order = []
        while stack:
            v = stack.pop()
            step = int(makers[v])
            if not finite[step]:
                # Only a required one surely has to be kept; another is if chosen.
                order.append((v, -1))
                self._node[v] = count
                count += 1
                continue
            order.append((v, step))
            self._node[v] = count
            count += 1
            if step in self._step_node:
                continue
            self._step_node[step] = count
            count += 1
            for u in reads[step]:
                if not free[u] and u not in seen:
                    seen.add(u)
                    stack.append(u)
        keep_nodes, keep_heads, keep_sizes = [], [], []
        for v, step in order:
            keep_nodes.append(self._node[v])
            keep_heads.append(1 if step < 0 else self._step_node[step])
            keep_sizes.append(int(sizes[v]))
        for step, node in self._step_node.items():
            for u in reads[step]:
                if not free[u]:
                    tails.append(node)
                    heads.append(self._node[u])
        tails += [0] * len(starts)
        heads += [self._node[v] for v in sorted(starts)]
        steps = list(self._step_node)
        self._steps = np.asarray(steps, np.int64)
        self._step_nodes = np.asarray(list(self._step_node.values()), np.int64)
        self._versions = np.asarray([v for v, _ in order], np.int64)
        self._keep_nodes = np.asarray(keep_nodes, np.int64)
        self._keep_heads = np.asarray(keep_heads, np.int64)
        self._keep_sizes = np.asarray(keep_sizes, np.int64)
        self._costs = costs[self._steps] if steps else np.zeros(0)
        self._tails = np.asarray(tails, np.int64)
        self._heads = np.asarray(heads, np.int64)
        self._count = count
        self.total_cost = float(self._costs.sum())

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
            return Cut(frozenset(), self.fixed_bytes, 0.0)
        # Where all is free to evaluate again, so is any positive price too high.
        scale = _WHOLE / self.total_cost if self.total_cost else 1.0
        keep = self._keep_sizes * (price * scale)
        if weight is not None:
            keep = keep * weight[self._versions]
        sunk = self._keep_heads == 1
        capacity = np.minimum(keep, _WHOLE - 1).astype(np.int64)
        # What can't be evaluated again costs the same in every cut where it is needed.
        capacity[sunk] = np.minimum(capacity[sunk], _WHOLE // max(int(sunk.sum()), 1))
        again = np.floor(self._costs * scale).astype(np.int64)
        tails = np.concatenate(
            [self._keep_nodes, self._step_nodes, self._tails]
        ).astype(np.int32)
        heads = np.concatenate(
            [self._keep_heads, np.ones(len(self._steps), np.int64), self._heads]
        ).astype(np.int32)
        values = np.concatenate(
            [capacity, again, np.full(len(self._tails), _WHOLE - 1)]
        ).astype(np.int32)
        shape = (self._count, self._count)
        graph = csr_matrix((values, (tails, heads)), shape=shape)
        flow = maximum_flow(graph, 0, 1).flow
        residual = graph - flow
        residual.data = (residual.data > 0).astype(np.int32)
        residual.eliminate_zeros()
        reached = np.zeros(self._count, bool)
        reached[breadth_first_order(residual, 0, return_predecessors=False)] = True
        chosen = reached[self._step_nodes]
        kept = reached[self._keep_nodes] & ~reached[self._keep_heads]
        return Cut(
            frozenset(self._steps[chosen].tolist()),
            self.fixed_bytes + int(self._keep_sizes[kept].sum()),
            float(self._costs[chosen].sum()),
        )


def across(sim: Simulation, step: int) -> Network:
    """The choices across `step` of a simulated schedule."""
    program = sim.program
    before = sim.made_at < step
    after = sim.last_use > step
    touched = np.zeros(len(sim.version_bytes), bool)
    touched[list(sim.reads[step])] = True
    own = slice(int(sim.first_version[step]), int(sim.first_version[step + 1]))
    touched[own] = True
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
        makes = range(int(sim.first_version[k]), int(sim.first_version[k + 1]))
        zero = any(sim.version_bytes[v] == 0 and sim.last_use[v] > step for v in makes)
        repeatable = sim.program.repeatable[sim.schedule[k]]
        if repeatable and not zero and not any(used[v] for v in makes):
            later[k] = True
        else:
            used[list(sim.reads[k])] = True
    return later
