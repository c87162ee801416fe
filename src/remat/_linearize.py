"""Splitting a function into what is saved, what is recomputed, and what is linear.

`jax.linearize` gives, for a program f of some operands, the residuals R that the linear
part of its derivative reads:

    f(operands) -> outputs, R        and        L(R, tangents) -> output tangents

Walking back from R through the equations of f, and stopping at operands and at the
values that the policy lets us save, gives the saved values S and the recompute slice
between S and R. The two programs that come out are

    known:    operands -> outputs, S
    tangent:  S, operands, tangents -> output tangents     (the slice, then L)

Because policies are applied after linearization, they see inside the forward rules of
`custom_vjp`, and a residual may be anything: a mask of one byte instead of the input of
four that it was made from.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import is_
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import Var, jaxprs_in_params
from jax.extend.core.primitives import cond_p

from remat._control_flow.bodies import with_checkpointed_bodies
from remat._errors import mutable_ref_error
from remat._flatten import trace_flat
from remat._jax import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    build_jaxpr,
    dce,
    evaluate,
    is_shard_map,
    ref_effects,
    side_effects,
    trace_context,
)
from remat._policies import Policy, nothing_saveable
from remat._primitive import remat_p
from remat._saving import renamed, save
from remat._stage import CHEAP, depends_on


@dataclass(frozen=True, eq=False)
class Linearized:
    """A program and its derivative in some of its operands.

    Attributes:
        consts: arrays that the derivative rules closed over.
        primal: consts, operands -> outputs; calls inlined.
        linear: the equations that depend on the tangents.
        tangents: operands of `linear`, one for each differentiated operand.
        out_tangents: results of `linear`, in the order of the outputs; None where an
            output does not depend on the differentiated operands.
    """

    consts: tuple[Any, ...]
    primal: ClosedJaxpr
    linear: tuple[JaxprEqn, ...]
    tangents: tuple[Var, ...]
    out_tangents: tuple[Var | Literal | None, ...]

    @property
    def residuals(self) -> list[Var]:
        """The values of `primal` that the linear part reads, each once."""
        linear_values = {*self.tangents, *(v for e in self.linear for v in e.outvars)}
        reads = [*(v for e in self.linear for v in e.invars), *self.out_tangents]
        return list(
            dict.fromkeys(
                v for v in reads if isinstance(v, Var) and v not in linear_values
            )
        )


def is_differentiable(aval: Any) -> bool:
    """Whether values of type `aval` have tangents: not integers, bools or keys."""
    return aval.to_tangent_aval().dtype != jax.dtypes.float0


def linearize(jaxpr: ClosedJaxpr, nonzero: tuple[bool, ...]) -> Linearized:
    """Linearize `jaxpr` in the operands marked in `nonzero`."""
    context = trace_context()
    linearized = _linearize(jaxpr, nonzero, context)
    if any(isinstance(c, Tracer) for c in linearized.consts):
        # A derivative rule closed over a tracer, which is only valid this time.
        return _linearize.__wrapped__(jaxpr, nonzero, context)
    return linearized


Derivative = Callable[..., tuple[list[Any], list[Any], list[Any]]]


def _by_jvp(f: Any, primals: list[Any], tangents: list[Any]) -> Any:
    """`jax.jvp`: the cheaper way, where no equation mixes primals with tangents."""
    outs, out_tangents, others = jax.jvp(f, primals, tangents, has_aux=True)
    return outs, out_tangents, others


def _by_linearize(f: Any, primals: list[Any], tangents: list[Any]) -> Any:
    """`jax.linearize`, which splits loops and branches in two."""
    try:
        outs, linear_map, others = jax.linearize(f, *primals, has_aux=True)
    except ValueError as error:
        if "Linearization failed" not in str(error):
            raise
        raise NotLinearizableError from error
    return outs, linear_map(*tangents), others


def holds_program(eqn: JaxprEqn) -> bool:
    """Whether the derivative of `eqn` may be one equation for primal and tangent both.

    That is so for whatever evaluates a program of its own (loops, branches, kernels),
    except where its rule takes the two apart. Reductions and scatters only combine two
    scalars by theirs.
    """
    name = eqn.primitive.name
    if eqn.primitive is remat_p or name in _TAKEN_APART or name.startswith(_COMBINING):
        return False
    return any(True for _ in jaxprs_in_params(eqn.params))


_TAKEN_APART = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_lin"})
_COMBINING = ("reduce", "scatter", "select_and")


def _trace_derivative(
    jaxpr: ClosedJaxpr,
    nonzero: Sequence[bool],
    differentiable: Sequence[bool],
    derivative: Derivative,
) -> tuple[ClosedJaxpr, list[Any]]:
    """Trace operands, tangents -> outputs, tangents of the differentiable outputs."""
    in_avals = jaxpr.in_avals
    tangent_avals = [
        aval.to_tangent_aval() for aval, nz in zip(in_avals, nonzero, strict=True) if nz
    ]

    def primals_and_tangents(*args: Any) -> list[Any]:
        primals, tangents = args[: len(in_avals)], args[len(in_avals) :]

        def of_differentiated(*differentiated: Any) -> tuple[list[Any], list[Any]]:
            operands = _merge(differentiated, inactive, nonzero)
            return _partition(evaluate(jaxpr, *operands), differentiable)

        active, inactive = _partition(primals, nonzero)
        outs, out_tangents, others = derivative(
            of_differentiated, active, list(tangents)
        )
        return [*_merge(outs, others, differentiable), *out_tangents]

    joint, consts = trace_flat(
        primals_and_tangents, [*in_avals, *tangent_avals], jaxpr.jaxpr.debug_info
    )
    check_refs(joint)
    return without_dead_equations(joint), consts


def check_refs(derivative: ClosedJaxpr) -> None:
    """Refuse derivative rules that use mutable arrays from outside of them."""
    if ref_effects(derivative):
        raise mutable_ref_error(
            derivative.jaxpr.debug_info.func_src_info,
            "has a derivative rule that reads or writes a mutable Ref",
        )


@lru_cache(maxsize=256)
def _linearize(
    jaxpr: ClosedJaxpr, nonzero: tuple[bool, ...], context: Any
) -> Linearized:
    del context
    differentiable = [is_differentiable(aval) for aval in jaxpr.out_avals]
    by_jvp = not any(holds_program(eqn) for eqn in jaxpr.eqns)
    derivative = _by_jvp if by_jvp else _by_linearize
    joint, consts = _trace_derivative(jaxpr, nonzero, differentiable, derivative)
    num_tangents = sum(nonzero)
    is_linear = depends_on(joint.eqns, joint.jaxpr.invars[-num_tangents:])
    if by_jvp and any(
        linear and holds_program(eqn)
        for eqn, linear in zip(joint.eqns, is_linear, strict=True)
    ):
        # A derivative rule has a loop that computes both at once.
        joint, consts = _trace_derivative(jaxpr, nonzero, differentiable, _by_linearize)
        is_linear = depends_on(joint.eqns, joint.jaxpr.invars[-num_tangents:])
    invars, outvars = joint.jaxpr.invars, joint.jaxpr.outvars
    primals, tangents = invars[:-num_tangents], invars[-num_tangents:]
    primal_eqns, linear_eqns = _partition(joint.eqns, [not x for x in is_linear])
    num_outs = len(differentiable)
    linear_values = {*tangents, *(v for e in linear_eqns for v in e.outvars)}
    # An output tangent that doesn't depend on the tangents is a zero.
    given = iter(outvars[num_outs:])
    out_tangents = [next(given) if diff else None for diff in differentiable]
    return Linearized(
        tuple(consts),
        build_jaxpr(primals, outvars[:num_outs], primal_eqns, like=joint.jaxpr),
        tuple(linear_eqns),
        tuple(tangents),
        tuple(
            v if isinstance(v, Var) and v in linear_values else None
            for v in out_tangents
        ),
    )


class NotLinearizableError(Exception):
    """A program has a derivative, but none that comes apart from its values."""


def with_tangents(
    jaxpr: ClosedJaxpr, nonzero: tuple[bool, ...]
) -> tuple[ClosedJaxpr, list[Any]]:
    """Operands, tangents -> outputs, tangents of the differentiable outputs.

    For forward mode through what `jax.linearize` can't take apart. Also what the
    derivative rules closed over, the leading operands.
    """
    differentiable = [is_differentiable(aval) for aval in jaxpr.out_avals]
    return _trace_derivative(jaxpr, nonzero, differentiable, _by_jvp)


@dataclass(frozen=True, eq=False)
class Split:
    """A program and its derivative, with what a policy saves between them.

    The operands of both are those of the program with the `consts` in front.

    Attributes:
        consts: arrays that the derivative rules closed over.
        primal: operands -> outputs, with all that the derivative reads.
        known: operands -> outputs, then the saved values that are no outputs.
        tangent: saved values, needed operands, tangents -> nonzero output tangents.
        recomputed: the equations of `tangent` that depend on no tangent.
        saved: for each saved value, its position among the results of `known`.
        needed: positions of the operands that `tangent` reads.
        active: of the differentiated operands, those whose tangent it reads.
        out_nonzero: for each output, whether it has a tangent.
    """

    consts: tuple[Any, ...]
    primal: ClosedJaxpr
    known: ClosedJaxpr
    tangent: ClosedJaxpr
    recomputed: tuple[JaxprEqn, ...]
    saved: tuple[int, ...]
    needed: tuple[int, ...]
    active: tuple[bool, ...]
    out_nonzero: tuple[bool, ...]


def split(
    jaxpr: ClosedJaxpr,
    nonzero: tuple[bool, ...],
    policy: Policy | None,
    keep_apart: bool,
) -> Split:
    """Linearize `jaxpr` in the operands marked in `nonzero`, and save by `policy`.

    Raises:
        NotLinearizableError: it only has a derivative in forward mode, as one program.
    """
    rewritten = with_checkpointed_bodies(jaxpr, policy, keep_apart, loops_only=False)
    parts = _split(linearize(rewritten, nonzero), policy)
    if _work(parts.recomputed) > 0.5 * _work(parts.primal.eqns):
        rewritten = with_checkpointed_bodies(jaxpr, policy, keep_apart, loops_only=True)
        parts = _split(linearize(rewritten, nonzero), policy)
    return parts


def _work(eqns: Iterable[JaxprEqn]) -> int:
    """How many equations that cost something are in branches and `shard_map`s."""

    def count(eqns: Iterable[JaxprEqn]) -> int:
        return sum(
            count(e for inner in inside for e in inner.eqns)
            if (inside := list(jaxprs_in_params(eqn.params)))
            else eqn.primitive.name not in CHEAP and not side_effects(eqn)
            for eqn in eqns
        )

    return count(e for e in eqns if e.primitive is cond_p or is_shard_map(e))


@lru_cache(maxsize=256)
def _split(linearized: Linearized, policy: Policy | None) -> Split:
    primal = linearized.primal.jaxpr
    part = save(linearized.primal, linearized.residuals, policy or nothing_saveable)
    outs = list(primal.outvars)
    position = {v: i for i, v in enumerate(outs) if isinstance(v, Var)}
    for v in part.values:
        if v not in position:  # an output that is saved is not returned twice
            position[v] = len(outs)
            outs.append(v)
    known = build_jaxpr(primal.invars, outs, part.eqns, like=primal)

    linear = [renamed(eqn, part.stands_for) for eqn in linearized.linear]
    tangent_eqns = [*part.recomputed, *linear]
    out_tangents = [v for v in linearized.out_tangents if v is not None]
    read = {v for e in tangent_eqns for v in e.invars if isinstance(v, Var)}
    read |= {v for v in out_tangents if isinstance(v, Var)}
    active = [v in read for v in linearized.tangents]
    tangents, _ = _partition(linearized.tangents, active)
    needed = [i for i, v in enumerate(primal.invars) if v in read]
    tangent = build_jaxpr(
        [*part.values, *(primal.invars[i] for i in needed), *tangents],
        out_tangents,
        tangent_eqns,
        like=primal,
    )
    return Split(
        linearized.consts,
        linearized.primal,
        without_dead_equations(known),
        tangent,
        part.recomputed,
        tuple(position[v] for v in part.values),
        tuple(needed),
        tuple(active),
        tuple(v is not None for v in linearized.out_tangents),
    )


def without_dead_equations(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """`jaxpr` less the equations that no result needs; all its operands stay."""
    live, _ = dce(jaxpr, (True,) * len(jaxpr.out_avals))
    if len(live.eqns) == len(jaxpr.eqns) and all(map(is_, live.eqns, jaxpr.eqns)):
        return jaxpr
    inner = jaxpr.jaxpr
    return build_jaxpr(inner.invars, inner.outvars, live.eqns, like=inner)


def _partition(values: Sequence[Any], mask: Sequence[bool]) -> tuple[list, list]:
    yes = [v for v, m in zip(values, mask, strict=True) if m]
    no = [v for v, m in zip(values, mask, strict=True) if not m]
    return yes, no


def _merge(yes: Sequence[Any], no: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    yes_values, no_values = iter(yes), iter(no)
    return [next(yes_values) if m else next(no_values) for m in mask]
