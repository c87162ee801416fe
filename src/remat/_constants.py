"""Arrays that inner programs hold, made operands of the outermost one.

A jitted function keeps the arrays that it closes over in its own program, and JAX's
rules leave what they close over in the programs of loops and branches. Only a program
without such constants is opened: inlined, or taken apart by a policy.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Var
from jax.extend.core.primitives import closed_call_p, cond_p, jit_p, scan_p
from jax.extend.core.primitives import remat_p as jax_remat_p

from remat._jax import (
    ClosedJaxpr,
    JaxprEqn,
    build_jaxpr,
    jit_of_more_operands,
    scan_counts,
    scan_equation,
)
from remat._primitive import remat_p


def without_constants(program: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """`program` with the constants in it as leading operands, and what these are.

    What is evaluated as one piece (a `while_loop`, a kernel, the body of a `shard_map`,
    a function with a rule of its own) keeps its constants.
    """
    opened = _opened(program, {})
    return opened.program, list(opened.values)


def holds_constants(eqn: JaxprEqn) -> bool:
    """Whether constants are left in what `eqn` evaluates."""
    return any(program.consts for program in _programs(eqn))


@dataclass(frozen=True, eq=False)
class _Opened:
    """A program without constants.

    Attributes:
        given: the program as it was; kept, so that no other gets its identity.
        program: the same with new, leading operands.
        values: what those operands are.
    """

    given: ClosedJaxpr
    program: ClosedJaxpr
    values: tuple[Any, ...]

    @property
    def operands(self) -> "dict[_Key, Var]":
        """The new operands."""
        new = self.program.jaxpr.invars[: len(self.values)]
        return dict(zip(_keys(self.values), new, strict=True))

    def taking(self, operands: "dict[_Key, Var]") -> ClosedJaxpr:
        """The program with an operand for each of these, also for unread ones."""
        jaxpr, own = self.program.jaxpr, self.operands
        new = [own.get(key) or Var(v.aval) for key, v in operands.items()]
        old = jaxpr.invars[len(self.values) :]
        return build_jaxpr([*new, *old], jaxpr.outvars, jaxpr.eqns, like=jaxpr)


_Memo = dict[tuple[int, ...], _Opened]

# Which array a constant is, and the how many-th of those that are the same one.
_Key = tuple[int, int]


def _keys(values: Sequence[Any]) -> list[_Key]:
    seen = Counter[int]()
    keys = []
    for value in values:
        keys.append((id(value), seen[id(value)]))
        seen[id(value)] += 1
    return keys


def _opened(program: ClosedJaxpr, memo: _Memo) -> _Opened:
    """One result per program, since what is made of a program is kept by identity."""
    key = (id(program.jaxpr), *map(id, program.consts))
    if key not in memo:
        memo[key] = _open(program, memo)
    return memo[key]


def _open(program: ClosedJaxpr, memo: _Memo) -> _Opened:
    jaxpr = program.jaxpr
    new = list(jaxpr.constvars)
    values = list(program.consts)
    operands = dict(zip(_keys(values), new, strict=True))
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        opened = [_opened(inner, memo) for inner in _programs(eqn)]
        for inner in opened:
            for value, (key, v) in zip(
                inner.values, inner.operands.items(), strict=True
            ):
                if key not in operands:
                    operands[key] = Var(v.aval)
                    new.append(operands[key])
                    values.append(value)
        read = {key: operands[key] for inner in opened for key in inner.operands}
        if read:
            bodies = [inner.taking(read) for inner in opened]
            eqn = _with_operands(eqn, list(read.values()), bodies)
        eqns.append(eqn)
    if values:
        invars = [*new, *jaxpr.invars]
        opened_program = build_jaxpr(invars, jaxpr.outvars, eqns, like=jaxpr)
        return _Opened(program, opened_program, tuple(values))
    return _Opened(program, program, ())


def _programs(eqn: JaxprEqn) -> Sequence[ClosedJaxpr]:
    """What `eqn` evaluates, if it can be given further operands."""
    params = eqn.params
    if eqn.primitive in (jit_p, scan_p, remat_p):
        return (params["jaxpr"],)
    if eqn.primitive is closed_call_p:
        return (params["call_jaxpr"],)
    if eqn.primitive is cond_p:
        return params["branches"]
    if eqn.primitive is jax_remat_p:
        return (ClosedJaxpr(params["jaxpr"], ()),)
    return ()


def _with_operands(
    eqn: JaxprEqn, operands: Sequence[Var], bodies: Sequence[ClosedJaxpr]
) -> JaxprEqn:
    """`eqn` with these operands in front, and programs that take them."""
    params, invars = eqn.params, [*operands, *eqn.invars]
    if eqn.primitive is cond_p:
        index, *rest = eqn.invars
        invars = [index, *operands, *rest]
        return eqn.replace(invars=invars, params=dict(params, branches=tuple(bodies)))
    (body,) = bodies
    if eqn.primitive is scan_p:
        num_consts, num_carry = scan_counts(eqn)
        num_consts += len(operands)
        return scan_equation(eqn, body, invars, eqn.outvars, num_consts, num_carry)
    if eqn.primitive is jit_p:
        params = jit_of_more_operands(params, len(operands), body)
    elif eqn.primitive is closed_call_p:
        params = dict(params, call_jaxpr=body)
    else:
        apart = params["prevent_cse"]
        if not isinstance(apart, bool):
            apart = (False,) * len(operands) + tuple(apart)
        own = eqn.primitive is remat_p
        params = dict(params, jaxpr=body if own else body.jaxpr, prevent_cse=apart)
    return eqn.replace(invars=invars, params=params)
