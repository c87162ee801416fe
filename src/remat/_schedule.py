"""Schedules: in which order a backward pass and its recomputation are evaluated.

A program is given by the numbers of the values that each equation reads and makes. A
schedule evaluates its equations in some order, in groups; a barrier goes in front of a
group that recomputes, so that a compiler can neither evaluate it earlier nor merge it
with the evaluation it repeats.
"""

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from remat._simulate import Simulation


@dataclass(frozen=True)
class Group:
    """Equations to evaluate next, behind a barrier if there is something to tie.

    Attributes:
        equations: numbers of the equations, in order of evaluation.
        inputs: values from before the group that its recomputation starts from.
        settled: values made since the last barrier that are still needed. Without them
            in the barrier a compiler may postpone what makes them, and so keep alive
            what they are made from.
        late: whether the group has to wait for what was evaluated before it.

    The group and all that follows read both as they come out of the barrier.
    """

    equations: tuple[int, ...]
    inputs: tuple[int, ...] = ()
    settled: tuple[int, ...] = ()
    late: bool = False

    @property
    def has_barrier(self) -> bool:
        """Whether a barrier precedes the group."""
        return bool(self.inputs or self.settled)


def just_in_time(
    reads: Sequence[Sequence[int]],
    makes: Sequence[Sequence[int]],
    is_backward: Sequence[bool],
    is_cheap: Sequence[bool],
    cotangents: Sequence[int],
    results: Sequence[int],
    sizes: Mapping[int, int],
) -> list[Group]:
    """Evaluate each recomputation right before the first equation that needs it.

    A group has no barrier if all its equations are cheap and start from values that an
    earlier barrier holds back: a compiler can't merge those with the first evaluation,
    and fuses them with what uses them.

    Args:
        reads: for each equation, the values it reads.
        makes: for each equation, the values it makes.
        is_backward: for each equation, whether it depends on a cotangent. The others
            recompute; they must not depend on backward equations.
        is_cheap: for each equation, whether a compiler would fuse it with its use.
        cotangents: the operands that the first barrier has to wait for.
        results: values that are needed at the end.
        sizes: bytes of each value.

    Returns:
        Groups that together evaluate every equation that a backward equation or a
        result needs, exactly once. Equations keep their given order within the backward
        pass, but that one whose result is no smaller than what it reads waits for its
        first use; and within each group's recomputation. So the schedule is the same
        on every host.
    """
    maker = {value: i for i, values in enumerate(makes) for value in values}
    uses_left = _count_uses(reads, maker, is_backward, results)
    held_back = set(cotangents)
    done: set[int] = set()
    fresh: list[int] = list(cotangents)
    groups: list[Group] = []

    def evaluate(group: Group) -> None:
        groups.append(group)
        for equation in group.equations:
            done.add(equation)
            fresh.extend(makes[equation])
            held_back.update(makes[equation])
            for value in reads[equation]:
                uses_left[value] -= 1

    def recompute(targets: Sequence[int]) -> None:
        equations = _missing(targets, reads, maker, is_backward, done)
        if not equations:
            return
        made = {value for i in equations for value in makes[i]}
        inputs = dict.fromkeys(v for i in equations for v in reads[i] if v not in made)
        cheap = all(is_cheap[i] for i in equations)
        if not inputs or (cheap and held_back.issuperset(inputs)):
            evaluate(Group(equations))
            return
        settled = tuple(v for v in dict.fromkeys(fresh) if uses_left.get(v, 0) > 0)
        fresh.clear()
        tied = frozenset(settled)
        unsettled = tuple(v for v in inputs if v not in tied)
        held_back.update(unsettled)
        evaluate(Group(equations, unsettled, settled))

    for i in _postponed(reads, makes, maker, is_backward, results, sizes):
        recompute(reads[i])
        evaluate(Group((i,)))
    recompute(results)
    return groups


def _postponed(
    reads: Sequence[Sequence[int]],
    makes: Sequence[Sequence[int]],
    maker: dict[int, int],
    is_backward: Sequence[bool],
    results: Sequence[int],
    sizes: Mapping[int, int],
) -> list[int]:
    """The backward equations, those that don't shrink put in front of their first use.

    The first equation backward through a mixture of experts expands the cotangent to a
    row for each expert. Evaluated at once, that row waits while what the next equation
    needs is recomputed. What makes a result stays where it is: waiting would hold its
    inputs, and results are no temporaries.
    """
    returned = frozenset(results)
    waits = [
        back
        and returned.isdisjoint(makes[i])
        and sum(sizes[v] for v in makes[i]) >= sum(sizes[v] for v in set(reads[i]))
        for i, back in enumerate(is_backward)
    ]
    backward = [i for i, back in enumerate(is_backward) if back]
    order: dict[int, None] = {}
    # Those that wait come last, for the ones whose results nothing reads.
    for i in sorted(backward, key=lambda i: (waits[i], i)):
        stack = [i]
        while stack:
            equation = stack[-1]
            waiting = [
                maker[v]
                for v in reads[equation]
                if v in maker and is_backward[maker[v]] and maker[v] not in order
            ]
            if waiting:
                stack.extend(sorted(waiting, reverse=True))
            else:
                order.setdefault(stack.pop())
    return list(order)


def _missing(
    targets: Sequence[int],
    reads: Sequence[Sequence[int]],
    maker: dict[int, int],
    is_backward: Sequence[bool],
    done: Container[int],
) -> tuple[int, ...]:
    """Recomputing equations that `targets` need and that are not done, in order."""
    found: set[int] = set()
    stack = list(targets)
    while stack:
        equation = maker.get(stack.pop())
        if equation is None or equation in done or equation in found:
            continue
        if is_backward[equation]:
            continue
        found.add(equation)
        stack.extend(reads[equation])
    return tuple(sorted(found))


def _count_uses(
    reads: Sequence[Sequence[int]],
    maker: dict[int, int],
    is_backward: Sequence[bool],
    results: Sequence[int],
) -> dict[int, int]:
    """How many reads of each value the schedule will make, results included."""
    backward = [i for i, back in enumerate(is_backward) if back]
    roots = [*results, *(value for i in backward for value in reads[i])]
    live = [*backward, *_missing(roots, reads, maker, is_backward, ())]
    uses: dict[int, int] = defaultdict(int)
    for value in results:
        uses[value] += 1
    for i in live:
        for value in reads[i]:
            uses[value] += 1
    return uses


def behind_barriers(sim: Simulation) -> list[Group]:
    """The steps of a simulated schedule, barriers before those that are late.

    A step is late if one that comes after it in the program has been evaluated: it is
    evaluated again, or was postponed. Late steps that follow one another are a group.
    """
    schedule, first = sim.schedule, sim.first_version
    value = [v for equation in schedule for v in sim.program.makes[equation]]
    groups: list[Group] = []
    fresh: list[int] = []  # versions made since the last barrier
    highest, step = -1, 0
    while step < len(schedule):
        start, late = step, schedule[step] <= highest
        while step < len(schedule) and (schedule[step] <= highest) == late:
            highest = max(highest, schedule[step])
            step += 1
        inputs: tuple[int, ...] = ()
        settled: tuple[int, ...] = ()
        if late:
            tied = [v for v in fresh if sim.last_use[v] >= start]
            read = dict.fromkeys(v for k in range(start, step) for v in sim.reads[k])
            known = set(tied)
            inputs = tuple(
                value[v] for v in read if v < first[start] and v not in known
            )
            settled = tuple(value[v] for v in tied)
            fresh.clear()
        fresh.extend(range(int(first[start]), int(first[step])))
        groups.append(Group(schedule[start:step], inputs, settled, late))
    return groups
