"""Branches, opened for policies.

What is saved in one branch is a result that the other branches fill. Values of the same
type of different branches share a result.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.extend.core.primitives import cond_p

from remat._control_flow.parts import (
    Atom,
    Parts,
    Results,
    Save,
    Saved,
    partition,
    variables,
)
from remat._jax import (
    ClosedJaxpr,
    DebugInfo,
    JaxprEqn,
    build_jaxpr,
    is_extended,
    new_equation,
    trace,
)
from remat._stage import depends_on


def cond_split(eqn: JaxprEqn, wanted: Sequence[Var], save: Save) -> Parts:
    """Save what is saved in the branch that is taken."""
    index, *operands = eqn.invars
    branches: Sequence[ClosedJaxpr] = eqn.params["branches"]
    position = {v: i for i, v in enumerate(eqn.outvars)}

    def inside(branch: ClosedJaxpr, results: Sequence[Var]) -> list[Atom]:
        return [branch.jaxpr.outvars[position[v]] for v in results]

    def save_each(results: Sequence[Var]) -> list[Saved]:
        return [save(b, variables(inside(b, results))) for b in branches]

    parts = save_each(wanted)
    fills = [_fills(b) for b in branches]

    def is_direct(v: Var) -> bool:
        """Whether `v` is saved in a branch, and the others only fill it."""
        results = [inside(b, [v])[0] for b in branches]
        kept = [part.keeps(u) for part, u in zip(parts, results, strict=True)]
        return any(kept) and all(
            keep or not isinstance(u, Var) or u in fill
            for keep, u, fill in zip(kept, results, fills, strict=True)
        )

    direct, rest = partition(wanted, is_direct)
    if not rest:
        return Parts(eqn, tuple(direct), None)

    parts = save_each(rest)
    results = Results(eqn)
    outers: list[dict[Var, Var]] = []
    slots: list[Var] = []  # further results of the known equation
    in_slots: list[list[Var | None]] = []  # what each branch returns there
    for branch, part in zip(branches, parts, strict=True):
        at = part.positions(branch.jaxpr.outvars)
        outer: dict[Var, Var] = {}
        taken: list[Var | None] = [None] * len(slots)
        for u in part.values:
            if u in at:
                outer[u] = results.at(at[u])
                continue
            free = (
                i
                for i, v in enumerate(slots)
                if taken[i] is None and v.aval.str_short() == u.aval.str_short()
            )
            i = next(free, None)
            if i is None:
                i = len(slots)
                slots.append(results.add(u.aval))
                taken.append(None)
            taken[i] = u
            outer[u] = slots[i]
        outers.append(outer)
        in_slots.append(taken)
    known_branches = tuple(
        _returning_too(branch, part, taken, slots)
        for branch, part, taken in zip(branches, parts, in_slots, strict=True)
    )
    known = eqn.replace(
        outvars=results.outvars,
        params=dict(eqn.params, branches=known_branches),
        effects=frozenset().union(*(b.effects for b in known_branches)),
    )

    reads = [
        part.reads(inside(branch, rest))
        for branch, part in zip(branches, parts, strict=True)
    ]
    read_operands = [
        i
        for i in range(len(operands))
        if any(b.jaxpr.invars[i] in r for b, r in zip(branches, reads, strict=True))
    ]
    read_results = dict.fromkeys(
        v
        for outer, read in zip(outers, reads, strict=True)
        for u, v in outer.items()
        if u in read
    )
    again = []
    for branch, part, outer in zip(branches, parts, outers, strict=True):
        # What only another branch reads has no name in this one.
        names = {v: u for u, v in outer.items()}
        again.append(
            build_jaxpr(
                [
                    *(branch.jaxpr.invars[i] for i in read_operands),
                    *(names.get(v) or Var(v.aval) for v in read_results),
                ],
                [part.copy(u) for u in inside(branch, rest)],
                part.recomputed,
                like=branch.jaxpr,
            )
        )
    recomputed = new_equation(
        cond_p,
        [index, *(operands[i] for i in read_operands), *read_results],
        rest,
        dict(eqn.params, branches=tuple(again)),
        like=eqn,
        effects=frozenset().union(*(b.effects for b in again)),
    )
    saved = [*direct, *(v for outer in outers for v in outer.values())]
    return Parts(known, tuple(dict.fromkeys(saved)), recomputed)


def _fills(branch: ClosedJaxpr) -> set[Var]:
    """What `branch` makes of nothing, in place of what another branch returns."""
    eqns = branch.eqns
    dependent = depends_on(eqns, branch.jaxpr.invars)
    return {
        v
        for eqn, depends in zip(eqns, dependent, strict=True)
        if not depends
        for v in eqn.outvars
    }


def _returning_too(
    branch: ClosedJaxpr,
    part: Saved,
    taken: Sequence[Var | None],
    slots: Sequence[Var],
) -> ClosedJaxpr:
    """`branch`, returning the values `taken`; where there is none, zeros."""
    taken = [*taken, *([None] * (len(slots) - len(taken)))]
    if all(v is None for v in taken) and not slots:
        return part.extended(branch, [])
    missing = [slot.aval for v, slot in zip(taken, slots, strict=True) if v is None]
    zeros, _ = trace(
        lambda *examples: [_zeros(x) for x in examples],
        missing,
        DebugInfo("zeros", "zeros", (), None),
    )
    filling = iter(zeros.jaxpr.outvars)
    added = [next(filling) if v is None else v for v in taken]
    jaxpr = branch.jaxpr
    return build_jaxpr(
        jaxpr.invars,
        [*jaxpr.outvars, *added],
        [*part.eqns, *zeros.eqns],
        like=jaxpr,
    )


def _zeros(example: Any) -> Any:
    """Zeros of the type of `example`."""
    if is_extended(example.aval):
        data = jnp.zeros_like(jax.random.key_data(example))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(example))
    return jnp.zeros_like(example)
