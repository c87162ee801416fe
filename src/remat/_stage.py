"""Staging: a backward jaxpr, rewritten so that it recomputes just in time.

With one barrier in front of it all, a compiler recomputes everything first and keeps it
all, and the peak is no lower than without rematerialization. The rewritten jaxpr has a
barrier in front of each group of recomputation, which ties what the group starts from
to what the backward pass has reached (`remat._schedule`).
"""

from collections.abc import Sequence
from functools import lru_cache

from jax.extend.core import DropVar, Var

from remat._emit import Emitter
from remat._jax import ClosedJaxpr, JaxprEqn, Literal, num_bytes
from remat._primitive import remat_p
from remat._schedule import just_in_time

# Primitives that compilers fuse with what uses their result, at next to no cost.
CHEAP = frozenset(
    [
        "abs",
        "acos",
        "add",
        "add_any",
        "and",
        "asin",
        "atan",
        "atan2",
        "broadcast_in_dim",
        "cbrt",
        "ceil",
        "clamp",
        "convert_element_type",
        "copy",
        "cos",
        "cosh",
        "div",
        "eq",
        "erf",
        "erf_inv",
        "exp",
        "exp2",
        "expand_dims",
        "expm1",
        "floor",
        "ge",
        "gt",
        "integer_pow",
        "iota",
        "is_finite",
        "le",
        "log",
        "log1p",
        "logistic",
        "lt",
        "max",
        "min",
        "mul",
        "name",
        "ne",
        "neg",
        "not",
        "nextafter",
        "one_minus_square",
        "or",
        "pow",
        "pvary",
        "real",
        "imag",
        "reduce_precision",
        "rem",
        "reshape",
        "round",
        "rsqrt",
        "select_n",
        "sign",
        "sin",
        "sinh",
        "sqrt",
        "square",
        "squeeze",
        "stop_gradient",
        "sub",
        "tan",
        "tanh",
        "xor",
    ]
)


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
        [eqn.primitive.name in CHEAP for eqn in eqns],
        numbers(cotangents),
        numbers(jaxpr.jaxpr.outvars),
        {i: num_bytes(v.aval) for i, v in enumerate(values)},
    )
    emitter = Emitter(jaxpr)
    for group in groups:
        tied = [values[i] for i in group.settled]
        tied += [values[i] for i in group.inputs if i not in untied]
        if group.has_barrier and (len(tied) > len(group.settled) or not group.inputs):
            emitter.barrier(tied, like=eqns[group.equations[0]])
        for i in group.equations:
            eqn = emitter.evaluate(i)
            if eqn.primitive is remat_p and not eqn.params["staged"]:
                # What a nested checkpoint returns is where its own recomputation starts
                # from later. Without a barrier here, fusions evaluate it once for each
                # use: the halving scheme of 64 functions compiles 1.5 times as long.
                made = [v for v in eqn.outvars if not isinstance(v, DropVar)]
                emitter.barrier(made, like=eqn)
    return emitter.finish()
