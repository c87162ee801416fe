"""Branches, opened for policies.

What is saved in one branch is a result that the other branches fill. Values of the same
type of different branches share a result.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import DropVar, Var
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
    side_effects,
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

    programs = [_parted(b) for b in branches]

    def save_each(results: Sequence[Var]) -> list[Saved]:
        return [
            _with_fixed(save(varying, variables(inside(branch, results))), fixed)
            for branch, (varying, fixed) in zip(branches, programs, strict=True)
        ]

    parts = save_each(wanted)

    def is_direct(v: Var) -> bool:
        """Whether a branch saves `v`; then what others return there is kept as well."""
        return any(
            part.keeps(u)
            for branch, part in zip(branches, parts, strict=True)
            for u in inside(branch, [v])
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


def _parted(branch: ClosedJaxpr) -> tuple[ClosedJaxpr, list[JaxprEqn]]:
    """`branch` less the equations that make something of nothing, and those.

    What they make often fills the place of what another branch returns, and is not
    worth saving.
    """
    jaxpr = branch.jaxpr
    dependent = depends_on(branch.eqns, jaxpr.invars)
    fixed, varying = [], []
    for eqn, depends in zip(branch.eqns, dependent, strict=True):
        (varying if depends or side_effects(eqn) else fixed).append(eqn)
    made = [v for e in fixed for v in e.outvars if not isinstance(v, DropVar)]
    program = build_jaxpr([*jaxpr.invars, *made], jaxpr.outvars, varying, like=jaxpr)
    return program, fixed


def _with_fixed(part: Saved, fixed: Sequence[JaxprEqn]) -> Saved:
    """`part` of a program that read what the equations `fixed` make, with those."""
    read = part.reads(part.wanted)
    needed: list[JaxprEqn] = []
    for eqn in reversed(fixed):
        if not read.isdisjoint(eqn.outvars):
            needed.insert(0, eqn)
            read |= variables(eqn.invars)
    return replace(
        part, eqns=(*fixed, *part.eqns), recomputed=(*needed, *part.recomputed)
    )


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
