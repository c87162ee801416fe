"""Inlining of calls, so that policies and staging see single equations.

`jax.numpy` wraps much of what it does in `jit`; a policy has to see the products in it.
Shardings that a call gives its operands and results become constraints in its place. A
`jax.checkpoint` inside is made one of ours, with the policy that it has, so that its
recomputation is staged too.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from jax.extend.core import Var

from remat._constants import without_constants
from remat._jax import (
    ClosedJaxpr,
    DebugInfo,
    JaxprEqn,
    Literal,
    build_jaxpr,
    constrained_to,
    is_in_jax,
    new_equation,
    plain_call,
    trace,
    users_checkpoint,
)
from remat._primitive import remat_p


def trace_flat(
    fun: Callable[..., Sequence[Any]], avals: Sequence[Any], debug_info: DebugInfo
) -> tuple[ClosedJaxpr, list[Any]]:
    """The jaxpr of `fun` on flat operands of types `avals`, with its calls inlined.

    Also what `fun` and the functions that it calls closed over: the leading operands.
    """
    traced, consts = trace(fun, avals, debug_info)
    program, inner_consts = without_constants(traced)
    return flatten(program), [*inner_consts, *consts]


@lru_cache(maxsize=1024)
def flatten(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """`jaxpr` with its plain calls replaced by what they evaluate.

    Calls with layouts or compiler options of their own stay, and so does a program that
    has constants.
    """
    if jaxpr.consts or not any(
        plain_call(eqn) or users_checkpoint(eqn) for eqn in jaxpr.eqns
    ):
        return jaxpr
    eqns: list[JaxprEqn] = []
    names: dict[Var, Var | Literal] = {}
    _inline(jaxpr.eqns, names, eqns, scope=None)
    return build_jaxpr(
        jaxpr.jaxpr.invars,
        [_read(v, names) for v in jaxpr.jaxpr.outvars],
        eqns,
        like=jaxpr.jaxpr,
    )


def _inline(
    eqns: Sequence[JaxprEqn],
    names: dict[Var, Var | Literal],
    out: list[JaxprEqn],
    scope: JaxprEqn | None,
) -> None:
    """Append `eqns`, as called from the equation `scope`, to `out`.

    `names` maps the variables of the jaxpr at hand to those in `out`; it is also how
    the results of a call get back to its caller.
    """
    for eqn in eqns:
        invars = [_read(v, names) for v in eqn.invars]
        if scope is not None:
            eqn = _placed(eqn, scope)
        call = plain_call(eqn)
        if call is None:
            if (inner := users_checkpoint(eqn)) is not None:
                eqn = _taken_over(eqn, inner)
            if scope is not None:  # a jaxpr called twice must not define a value twice
                outvars = [type(v)(v.aval) for v in eqn.outvars]
                names.update(zip(eqn.outvars, outvars, strict=True))
                eqn = eqn.replace(invars=invars, outvars=outvars)
            elif invars != eqn.invars:
                eqn = eqn.replace(invars=invars)
            out.append(eqn)
            continue
        invars = _constrained(invars, call.in_shardings, eqn, out)
        inner_names: dict[Var, Var | Literal] = dict(
            zip(call.jaxpr.jaxpr.invars, invars, strict=True)
        )
        _inline(call.jaxpr.eqns, inner_names, out, scope=eqn)
        results = [_read(v, inner_names) for v in call.jaxpr.jaxpr.outvars]
        results = _constrained(results, call.out_shardings, eqn, out)
        names.update(zip(eqn.outvars, results, strict=True))


def _constrained(
    values: Sequence[Var | Literal],
    shardings: Sequence[Any],
    call: JaxprEqn,
    out: list[JaxprEqn],
) -> list[Var | Literal]:
    """`values` in the given shardings, where there is one."""
    constrained = list(values)
    for i, sharding in enumerate(shardings):
        if sharding is None:
            continue
        program, _ = trace(
            lambda x, sharding=sharding: [constrained_to(x, sharding)],
            [values[i].aval],
            DebugInfo("constraint", "constraint", (), None),
        )
        (operand,) = program.jaxpr.invars
        for eqn in program.eqns:
            read = [values[i] if v is operand else v for v in eqn.invars]
            out.append(eqn.replace(invars=read, source_info=call.source_info))
        (result,) = program.jaxpr.outvars
        constrained[i] = values[i] if result is operand else result
    return constrained


def _taken_over(eqn: JaxprEqn, program: ClosedJaxpr) -> JaxprEqn:
    """The equation of a `jax.checkpoint` as one of ours."""
    apart = eqn.params["prevent_cse"]
    program = flatten(program)
    params = {
        "jaxpr": program,
        "policy": eqn.params["policy"],
        "prevent_cse": (apart,) * len(eqn.invars)
        if isinstance(apart, bool)
        else tuple(apart),
        "num_linear": 0,
        "staged": False,
        "check_names": False,
    }
    return new_equation(
        remat_p, eqn.invars, eqn.outvars, params, like=eqn, effects=eqn.effects
    )


def _read(atom: Var | Literal, names: dict[Var, Var | Literal]) -> Var | Literal:
    return atom if isinstance(atom, Literal) else names.get(atom, atom)


def _placed(eqn: JaxprEqn, call: JaxprEqn) -> JaxprEqn:
    """`eqn` with the name scopes of the call it came from.

    A function of `jax.numpy` is traced once, where it is first called, and its
    equations carry that place for good. The place of the call is the one meant.
    """
    source = call.source_info
    stack = source.name_stack
    name = call.params.get("name")
    if name:
        stack = stack.extend(name)
    inner = call.params.get("jaxpr") or call.params["call_jaxpr"]
    info = eqn.source_info.replace(name_stack=stack + eqn.source_info.name_stack)
    if is_in_jax(_source_file(inner)):
        info = info.replace(traceback=source.traceback)
    return eqn.replace(source_info=info)


def _source_file(jaxpr: ClosedJaxpr) -> str:
    """The file of the function that `jaxpr` was traced from, or ''."""
    info = jaxpr.jaxpr.debug_info.func_src_info
    _, separator, place = info.rpartition(" at ")
    return place.rpartition(":")[0] if separator else ""
