"""The search for the equation that made a NaN or an infinity.

With `jax_debug_nans` or `jax_debug_infs` JAX looks at the results of each call that is
compiled, and calls the function of one with an invalid value among them once more, to
be evaluated in single operations. Ours is a program by then, in the evaluation of which
JAX switches that check off.
"""

from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax.extend.core import DropVar, Var

from remat._jax import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    build_jaxpr,
    call_with_rule,
    evaluate,
    invalid_values,
    plain_call,
    source_location,
)
from remat._primitive import remat_p


def evaluate_checked(jaxpr: ClosedJaxpr, *operands: Any) -> list[Any]:
    """Evaluate `jaxpr`, equation by equation where JAX is to look for invalid values.

    Raises:
        FloatingPointError: an equation made one. It says which, and where that is.
    """
    nans, infs = invalid_values()
    if not (nans or infs):
        return evaluate(jaxpr, *operands)
    # The looking is ours: JAX's own would stop at a whole call, with an internal error.
    with jax.debug_nans(False), jax.debug_infs(False):
        return _evaluate(jaxpr, operands, nans, infs)


def _evaluate(jaxpr: ClosedJaxpr, operands: Any, nans: bool, infs: bool) -> list[Any]:
    invars = [*jaxpr.jaxpr.constvars, *jaxpr.jaxpr.invars]
    values: dict[Var, Any] = dict(zip(invars, [*jaxpr.consts, *operands], strict=True))
    reads = [dict.fromkeys(filter(_is_variable, eqn.invars)) for eqn in jaxpr.eqns]
    last = {v: i for i, invars in enumerate(reads) for v in invars}
    results = jaxpr.jaxpr.outvars

    def read(atom: Var | Literal) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for i, (eqn, invars) in enumerate(zip(jaxpr.eqns, reads, strict=True)):
        outvars = [v for v in eqn.outvars if not isinstance(v, DropVar)]
        single = build_jaxpr([*invars], outvars, [eqn], like=jaxpr.jaxpr)
        outs = evaluate(single, *map(read, invars))
        kind = next(filter(None, (_invalid(x, nans, infs) for x in outs)), None)
        if kind is not None:
            inner = _program(eqn)
            if inner is not None:
                _evaluate(inner, [read(v) for v in eqn.invars], nans, infs)
            location = source_location(eqn)
            place = f", from {location[1]}" if location else ""
            raise FloatingPointError(
                f"invalid value ({kind}) encountered in {eqn.primitive.name}{place}"
            )
        values.update(zip(outvars, outs, strict=True))
        for v in invars:  # what nothing reads any more is freed, as in a compiled call
            if last[v] == i and v not in results:
                del values[v]
    return [read(v) for v in results]


def _is_variable(atom: Var | Literal) -> TypeGuard[Var]:
    return not isinstance(atom, Literal)


def _program(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """What `eqn` evaluates on its operands, if it is a call."""
    if eqn.primitive is remat_p:
        return eqn.params["jaxpr"]
    call = plain_call(eqn)
    return call.jaxpr if call is not None else call_with_rule(eqn)


def _invalid(x: Any, nans: bool, infs: bool) -> str | None:
    """Which of the values looked for is in `x`."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return None
    if nans and jnp.isnan(x).any():
        return "nan"
    return "inf" if infs and jnp.isinf(x).any() else None
