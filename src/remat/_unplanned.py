"""A program as it is without anyone's rematerialization.

A planner starts from here: checkpoints opened, what they evaluate again evaluated once,
barriers gone.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import DropVar, Var
from jax.extend.core.primitives import remat_p as jax_remat_p
from jax.lax import optimization_barrier_p

from remat._flatten import flatten
from remat._jax import ClosedJaxpr, JaxprEqn, Literal, build_jaxpr, side_effects
from remat._linearize import without_dead_equations
from remat._primitive import remat_p

Names = dict[Var, Var | Literal]


def unplanned(jaxpr: ClosedJaxpr, *, keep_checkpoints: bool) -> ClosedJaxpr:
    """`jaxpr`, which has no constants, with calls inlined and nothing dead or repeated.

    Args:
        jaxpr: the program.
        keep_checkpoints: leave checkpoints and barriers as they are.
    """
    jaxpr = flatten(jaxpr)
    if not keep_checkpoints:
        eqns: list[JaxprEqn] = []
        names: Names = {}
        _open(jaxpr.eqns, names, eqns, inside=False)
        jaxpr = _rebuilt(jaxpr, eqns, names)
        jaxpr = _without_repetition(jaxpr)
    return without_dead_equations(jaxpr)


def _open(
    eqns: Sequence[JaxprEqn], names: Names, out: list[JaxprEqn], *, inside: bool
) -> None:
    """Append `eqns` to `out`, what checkpoints evaluate in their place."""
    for eqn in eqns:
        invars = [_read(v, names) for v in eqn.invars]
        program = _checkpointed(eqn)
        if program is not None:
            inner: Names = dict(zip(program.jaxpr.invars, invars, strict=True))
            _open(program.eqns, inner, out, inside=True)
            invars = [_read(v, inner) for v in program.jaxpr.outvars]
        if program is not None or eqn.primitive is optimization_barrier_p:
            names.update(zip(eqn.outvars, invars, strict=True))
            continue
        outvars = eqn.outvars
        if inside:  # a program evaluated twice must not define a variable twice
            outvars = [type(v)(v.aval) for v in eqn.outvars]
            names.update(zip(eqn.outvars, outvars, strict=True))
        out.append(eqn.replace(invars=invars, outvars=outvars))


def _checkpointed(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """What `eqn` evaluates if it is a checkpoint, its forward or its backward pass."""
    if eqn.primitive is remat_p:
        return flatten(eqn.params["jaxpr"])
    if eqn.primitive is jax_remat_p:
        return flatten(ClosedJaxpr(eqn.params["jaxpr"], ()))
    return None


def _without_repetition(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """`jaxpr` with equations that do the same as one before them left out."""
    eqns: list[JaxprEqn] = []
    names: Names = {}
    known: dict[Hashable, Sequence[Var]] = {}
    for eqn in jaxpr.eqns:
        eqn = eqn.replace(invars=[_read(v, names) for v in eqn.invars])
        key = None if side_effects(eqn) or eqn.effects else _key(eqn)
        if key is not None and key in known:
            names.update(zip(eqn.outvars, known[key], strict=True))
            continue
        if any(isinstance(v, DropVar) for v in eqn.outvars):
            # Another like it may not drop that result.
            outvars = [Var(v.aval) for v in eqn.outvars]
            names.update(zip(eqn.outvars, outvars, strict=True))
            eqn = eqn.replace(outvars=outvars)
        if key is not None:
            known[key] = eqn.outvars
        eqns.append(eqn)
    return _rebuilt(jaxpr, eqns, names)


def _key(eqn: JaxprEqn) -> Hashable | None:
    """Equal for equations that make the same values; None where that isn't known."""
    params = tuple(sorted(eqn.params.items()))
    key = (eqn.primitive, params, tuple(map(_atom_key, eqn.invars)), repr(eqn.ctx))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _atom_key(atom: Var | Literal) -> Hashable:
    if isinstance(atom, Literal):
        value: Any = np.asarray(atom.val)
        return (atom.aval, value.dtype, value.tobytes())
    return atom


def _rebuilt(jaxpr: ClosedJaxpr, eqns: Sequence[JaxprEqn], names: Names) -> ClosedJaxpr:
    outvars = [_read(v, names) for v in jaxpr.jaxpr.outvars]
    return build_jaxpr(jaxpr.jaxpr.invars, outvars, eqns, like=jaxpr.jaxpr)


def _read(atom: Var | Literal, names: Names) -> Var | Literal:
    return atom if isinstance(atom, Literal) else names.get(atom, atom)
