"""Nested checkpoints, opened for the policy of the one around them."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Var

from remat._control_flow.parts import Atom, Parts, Results, Save, partition, variables
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
    jaxpr = program.jaxpr
    inner = dict(zip(eqn.outvars, jaxpr.outvars, strict=True))
    part = save(program, variables(inner[v] for v in wanted))
    if not part.values:
        return Parts(eqn, (), _again(eqn, wanted))
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
    known = eqn.replace(
        outvars=results.outvars, params=dict(params, jaxpr=body), effects=body.effects
    )
    saved = tuple(dict.fromkeys([*direct, *outer.values()]))
    if not rest:
        return Parts(known, saved, None)

    reads = part.reads(inner[v] for v in rest)
    inputs = [u for u in dict.fromkeys([*outer, *jaxpr.invars]) if u in reads]
    operand: dict[Var, Atom] = dict(zip(jaxpr.invars, eqn.invars, strict=True))
    outs = [part.copy(inner[v]) for v in rest]
    again = build_jaxpr(inputs, outs, part.recomputed, like=jaxpr)
    apart = (any(params["prevent_cse"]),) * len(inputs)
    recomputed = new_equation(
        remat_p,
        [(operand | outer)[u] for u in inputs],
        rest,
        dict(params, jaxpr=again, prevent_cse=apart, check_names=False),
        like=eqn,
        effects=again.effects,
    )
    return Parts(known, saved, recomputed)


def _again(eqn: JaxprEqn, wanted: Sequence[Var]) -> JaxprEqn:
    """The part of `eqn` that makes `wanted`; equal parts evaluate the same program."""
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
