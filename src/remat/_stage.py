"""Staging: a backward jaxpr, rewritten so that it recomputes just in time.

With one barrier in front of it all, a compiler recomputes everything first and keeps it
all, and the peak is no lower than without rematerialization. The rewritten jaxpr has a
barrier in front of each group of recomputation, which ties what the group starts from
to what the backward pass has reached (`remat._schedule`).
"""

from collections.abc import Sequence
from functools import lru_cache

from jax.extend.core import Var
from jax.lax import optimization_barrier_p

from remat._jax import ClosedJaxpr, JaxprEqn, Literal, build_jaxpr, new_equation
from remat._schedule import Group, just_in_time


def depends_on(eqns: Sequence[JaxprEqn], sources: Sequence[Var]) -> list[bool]:
    """For each equation, whether it depends on a value in `sources`."""
    reached = set(sources)
    dependent = []
    for eqn in eqns:
        depends = any(isinstance(v, Var) and v in reached for v in eqn.invars)
        dependent.append(depends)
        if depends:
            reached.update(eqn.outvars)
    return dependent


@lru_cache(maxsize=1024)
def staged(
    jaxpr: ClosedJaxpr, num_linear: int, prevent_cse: tuple[bool, ...]
) -> ClosedJaxpr:
    """`jaxpr` with its recomputation moved to where it is needed, behind barriers.

    Args:
        jaxpr: a program without constants, linear in its last `num_linear` operands
            (the cotangents). Equations that don't depend on those are recomputation.
        num_linear: how many of the operands are cotangents.
        prevent_cse: for each operand, whether recomputation from it has to be kept
            apart from the first computation. Without any, the jaxpr is returned as is.

    Returns:
        A jaxpr with the same operands and results.
    """
    eqns, invars = jaxpr.eqns, jaxpr.jaxpr.invars
    if not any(prevent_cse):
        return jaxpr
    cotangents = invars[len(invars) - num_linear :]
    is_backward = depends_on(eqns, cotangents)
    if all(is_backward):
        return jaxpr

    number: dict[Var, int] = {}
    values: list[Var] = []

    def numbers(atoms: Sequence[Var | Literal]) -> list[int]:
        for atom in atoms:
            if isinstance(atom, Var) and atom not in number:
                number[atom] = len(values)
                values.append(atom)
        return [number[atom] for atom in atoms if isinstance(atom, Var)]

    untied = {
        i for i, keep in zip(numbers(invars), prevent_cse, strict=True) if not keep
    }
    groups = just_in_time(
        [numbers(eqn.invars) for eqn in eqns],
        [numbers(eqn.outvars) for eqn in eqns],
        is_backward,
        numbers(cotangents),
        numbers(jaxpr.jaxpr.outvars),
    )
    return _emit(jaxpr, groups, values, untied)


def _emit(
    jaxpr: ClosedJaxpr, groups: Sequence[Group], values: Sequence[Var], untied: set[int]
) -> ClosedJaxpr:
    """Write the equations in the order of `groups`, with their barriers."""
    current: dict[Var, Var] = {}  # what a value is called after the barriers so far
    emitted: list[JaxprEqn] = []

    def read(atom: Var | Literal, names: dict[Var, Var]) -> Var | Literal:
        return atom if isinstance(atom, Literal) else names.get(atom, atom)

    for group in groups:
        names = current
        tied_inputs = [values[i] for i in group.inputs if i not in untied]
        settled = [values[i] for i in group.settled]
        if tied_inputs or (group.has_barrier and not group.inputs):
            tied = [*settled, *tied_inputs]
            outs = [Var(v.aval) for v in tied]
            operands = [read(v, current) for v in tied]
            first = jaxpr.eqns[group.equations[0]]
            emitted.append(
                new_equation(optimization_barrier_p, operands, outs, {}, like=first)
            )
            current.update(zip(settled, outs[: len(settled)], strict=True))
            # The originals of the inputs stay in use elsewhere: only the group itself
            # has to wait.
            names = current | dict(
                zip(tied_inputs, outs[len(settled) :], strict=True)
            )
        for i in group.equations:
            eqn = jaxpr.eqns[i]
            emitted.append(eqn.replace(invars=[read(v, names) for v in eqn.invars]))
    outvars = [read(v, current) for v in jaxpr.jaxpr.outvars]
    return build_jaxpr(jaxpr.jaxpr.invars, outvars, emitted, jaxpr.jaxpr.debug_info)
