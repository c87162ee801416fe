"""Calls, opened for the policy of the program around them.

Those that are left in a program are nested checkpoints, forward rules that wait for
what becomes of their residuals, and functions with a rule that was not asked for.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import DropVar, Var
from jax.extend.core.primitives import closed_call_p

from remat._control_flow.parts import (
    Atom,
    Parts,
    Results,
    Save,
    Saved,
    partition,
    variables,
)
from remat._flatten import flatten
from remat._jax import (
    ClosedJaxpr,
    JaxprEqn,
    build_jaxpr,
    dce,
    name_p,
    new_equation,
)
from remat._policies import Policy, asks
from remat._primitive import remat_p


def is_opened(eqn: JaxprEqn) -> bool:
    """Whether `eqn` is a nested checkpoint rather than a part of a derivative."""
    params = eqn.params
    return (
        eqn.primitive is remat_p and not params["staged"] and not params["num_linear"]
    )


def named_operands(program: ClosedJaxpr, policy: Policy) -> set[Var]:
    """The operands of `program` that it gives a name which `policy` saves."""
    source = {v: v for v in program.jaxpr.invars}
    named: set[Var] = set()
    for eqn in program.eqns:
        if eqn.primitive is name_p and isinstance(v := eqn.invars[0], Var):
            if v in source:
                source[eqn.outvars[0]] = source[v]
                if asks(policy, eqn):
                    named.add(source[v])
        elif is_opened(eqn):
            inner = eqn.params["jaxpr"]
            named_inside = named_operands(inner, policy)
            named |= {
                source[v]
                for v, u in zip(eqn.invars, inner.jaxpr.invars, strict=True)
                if u in named_inside and isinstance(v, Var) and v in source
            }
    return named


def remat_split(eqn: JaxprEqn, wanted: Sequence[Var], save: Save) -> Parts:
    """Save what is saved in the program that a nested checkpoint evaluates."""
    params, program = eqn.params, eqn.params["jaxpr"]
    _, part = _inside(eqn, program, wanted, save)
    if not part.values and not program.effects:
        return Parts(eqn, (), _again(eqn, wanted))

    def evaluating(
        body: ClosedJaxpr, operands: Sequence[Atom], results: Sequence[Var]
    ) -> JaxprEqn:
        if operands is eqn.invars:
            return eqn.replace(
                outvars=list(results),
                params=dict(params, jaxpr=body),
                effects=body.effects,
            )
        apart = (any(params["prevent_cse"]),) * len(operands)
        again = dict(params, jaxpr=body, prevent_cse=apart, check_names=False)
        return new_equation(
            remat_p, operands, results, again, like=eqn, effects=body.effects
        )

    return _split(eqn, program, part, wanted, evaluating)


def call_split(
    eqn: JaxprEqn, program: ClosedJaxpr, wanted: Sequence[Var], save: Save
) -> Parts:
    """Save what is saved in the program that a call without a rule evaluates.

    The forward rule of a `custom_vjp` that waits for what becomes of its residuals is
    left as it is where nothing in it is saved, so that the function itself may still be
    called in its place.
    """
    program = flatten(program)
    inner, part = _inside(eqn, program, wanted, save)
    if not part.values:
        return Parts(eqn, (), eqn)
    if all(part.keeps(inner[v]) for v in wanted):
        return Parts(eqn, tuple(wanted), None)

    def evaluating(
        body: ClosedJaxpr, operands: Sequence[Atom], results: Sequence[Var]
    ) -> JaxprEqn:
        params = {"call_jaxpr": body}
        return new_equation(
            closed_call_p, operands, results, params, like=eqn, effects=body.effects
        )

    return _split(eqn, program, part, wanted, evaluating)


def result_split(
    eqn: JaxprEqn, program: ClosedJaxpr, wanted: Sequence[Var], save: Save
) -> Parts:
    """Save the results of a call that are saved in the program that it evaluates.

    The call stays as it is, with its rule for derivatives, so that nothing else in it
    can be saved.
    """
    program = flatten(program)
    inner, part = _inside(eqn, program, wanted, save)
    direct, rest = partition(wanted, lambda v: part.keeps(inner[v]))
    if not rest:
        return Parts(eqn, tuple(direct), None)
    outvars = [v if v in rest else DropVar(v.aval) for v in eqn.outvars]
    return Parts(eqn, tuple(direct), eqn.replace(outvars=outvars))


def _inside(
    eqn: JaxprEqn, program: ClosedJaxpr, wanted: Sequence[Var], save: Save
) -> tuple[dict[Var, Atom], Saved]:
    """What `program` returns for each result of `eqn`, and what is saved in it."""
    inner = dict(zip(eqn.outvars, program.jaxpr.outvars, strict=True))
    return inner, save(program, variables(inner[v] for v in wanted))


def _split(
    eqn: JaxprEqn,
    program: ClosedJaxpr,
    part: Saved,
    wanted: Sequence[Var],
    evaluating: Callable[[ClosedJaxpr, Sequence[Atom], Sequence[Var]], JaxprEqn],
) -> Parts:
    """Take a call of `program` apart into calls that `evaluating` makes."""
    jaxpr = program.jaxpr
    inner = dict(zip(eqn.outvars, jaxpr.outvars, strict=True))
    direct, rest = partition(wanted, lambda v: part.keeps(inner[v]))

    results, added = Results(eqn), []
    position = part.positions(jaxpr.outvars)
    outer = {part.copy(inner[v]): v for v in direct}
    for u in part.values:
        if u in position:
            outer.setdefault(u, results.at(position[u]))
        else:
            added.append(u)
            outer[u] = results.add(u.aval)
    body = part.extended(program, added)
    known = evaluating(body, eqn.invars, results.outvars)
    saved = tuple(dict.fromkeys([*direct, *outer.values()]))
    if not rest:
        return Parts(known, saved, None)

    reads = part.reads(inner[v] for v in rest)
    inputs = [u for u in dict.fromkeys([*outer, *jaxpr.invars]) if u in reads]
    operand: dict[Var, Atom] = dict(zip(jaxpr.invars, eqn.invars, strict=True))
    outs = [part.copy(inner[v]) for v in rest]
    again = build_jaxpr(inputs, outs, part.recomputed, like=jaxpr)
    recomputed = evaluating(again, [(operand | outer)[u] for u in inputs], rest)
    return Parts(known, saved, recomputed)


def _again(eqn: JaxprEqn, wanted: Sequence[Var]) -> JaxprEqn:
    """The part of `eqn` that makes `wanted`; equal parts evaluate the same program.

    Effects would be part of it, wanted or not.
    """
    params = eqn.params
    is_wanted = tuple(v in wanted for v in eqn.outvars)
    program, is_read = dce(params["jaxpr"], is_wanted)

    def read(values: Sequence[Any]) -> list[Any]:
        return [x for x, yes in zip(values, is_read, strict=True) if yes]

    return new_equation(
        remat_p,
        read(eqn.invars),
        [v for v, yes in zip(eqn.outvars, is_wanted, strict=True) if yes],
        dict(params, jaxpr=program, prevent_cse=tuple(read(params["prevent_cse"]))),
        like=eqn,
        effects=program.effects,
    )
