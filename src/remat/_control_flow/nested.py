"""Nested checkpoints, opened for the policy of the one around them."""

from collections.abc import Sequence

from jax.extend.core import Var

from remat._control_flow.parts import Atom, Parts, Results, Save, partition, variables
from remat._jax import JaxprEqn, build_jaxpr, new_equation
from remat._primitive import remat_p


def is_opened(eqn: JaxprEqn) -> bool:
    """Whether `eqn` is a nested checkpoint rather than a part of a derivative."""
    params = eqn.params
    return (
        eqn.primitive is remat_p and not params["staged"] and not params["num_linear"]
    )


def remat_split(eqn: JaxprEqn, wanted: Sequence[Var], save: Save) -> Parts:
    """Save what is saved in the program that a nested checkpoint evaluates."""
    params, program = eqn.params, eqn.params["jaxpr"]
    jaxpr = program.jaxpr
    inner = dict(zip(eqn.outvars, jaxpr.outvars, strict=True))
    part = save(program, variables(inner[v] for v in wanted))
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
