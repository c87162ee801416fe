"""The bodies of `shard_map`, opened for policies.

What is saved in a body is returned split over the axes of the mesh along which it
varies (all of them where `check_vma` is False), as it lies on the devices. Nothing is
communicated for it. A scalar has no axis to split, so it is returned with one of
length 1.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Var
from jax.extend.core.primitives import broadcast_in_dim_p
from jax.sharding import PartitionSpec

from remat._control_flow.parts import (
    Atom,
    Parts,
    Results,
    Save,
    partition,
    variables,
)
from remat._jax import (
    ClosedJaxpr,
    DebugInfo,
    JaxprEqn,
    build_jaxpr,
    opaque_p,
    shard_map_body,
    trace,
    varying_axes,
)


def shard_map_split(eqn: JaxprEqn, wanted: Sequence[Var], save: Save) -> Parts:
    """Save on each device what is saved in the body."""
    params, program = eqn.params, shard_map_body(eqn)
    jaxpr = program.jaxpr
    inner = dict(zip(eqn.outvars, jaxpr.outvars, strict=True))
    maker = {v: e for e in program.eqns for v in e.outvars}
    scalar = {v: _scalar(u, maker) for v, u in inner.items()}
    part = save(program, variables(scalar[v] for v in wanted))
    direct, rest = partition(wanted, lambda v: part.keeps(scalar[v]))
    if not rest:
        return Parts(eqn, tuple(direct), None)

    part = save(program, variables(inner[v] for v in rest))
    position = part.positions(list(scalar.values()))
    results = Results(eqn)
    out_specs = list(params["out_specs"])
    returned: list[Var] = []  # by the body, besides what it returned before
    promoting: list[JaxprEqn] = []
    outer: dict[Var, Var] = {}
    spec_of: dict[Var, PartitionSpec] = {}
    for u in part.values:
        if u in position:
            outer[u] = results.at(position[u])
            spec_of[u] = out_specs[position[u]]
            continue
        eqns, local = _applied(_with_an_axis, u)
        promoting += eqns
        returned.append(local)
        spec_of[u] = _spec(local.aval, params)
        out_specs.append(spec_of[u])
        outer[u] = results.add(_global_type(eqn, local.aval, spec_of[u]))
    body = build_jaxpr(
        jaxpr.invars, [*jaxpr.outvars, *returned], [*part.eqns, *promoting], like=jaxpr
    )
    known = _evaluating(eqn, body, eqn.invars, results.outvars, out_specs=out_specs)

    outs = [part.copy(inner[v]) for v in rest]
    reads = part.reads(outs)
    inputs: list[Var] = []
    operands: list[Atom] = []
    in_specs: list[PartitionSpec] = []
    restoring: list[JaxprEqn] = []
    for u in part.values:
        if u in reads:
            _, like = _applied(_with_an_axis, u)
            local = u
            if like is not u:  # a scalar, which comes with an axis
                local = Var(like.aval)
                (restored,), _ = _applied(lambda x: x.reshape(()), local)
                restoring.append(restored.replace(outvars=[u]))
            inputs.append(local)
            operands.append(outer[u])
            in_specs.append(spec_of[u])
    for u, atom, spec in zip(jaxpr.invars, eqn.invars, params["in_specs"], strict=True):
        if u in reads:
            inputs.append(u)
            operands.append(atom)
            in_specs.append(spec)
    recomputed = _evaluating(
        eqn,
        build_jaxpr(inputs, outs, [*restoring, *part.recomputed], like=jaxpr),
        operands,
        rest,
        in_specs=in_specs,
        out_specs=[params["out_specs"][eqn.outvars.index(v)] for v in rest],
    )
    saved = [*direct, *outer.values()]
    return Parts(known, tuple(dict.fromkeys(saved)), recomputed)


def _evaluating(
    eqn: JaxprEqn,
    body: ClosedJaxpr,
    invars: Sequence[Atom],
    outvars: Sequence[Var],
    **specs: Sequence[PartitionSpec],
) -> JaxprEqn:
    """`eqn` with another body, other operands and results."""
    params = {name: tuple(values) for name, values in specs.items()}
    return eqn.replace(
        invars=list(invars),
        outvars=list(outvars),
        params=dict(eqn.params, jaxpr=body.jaxpr, **params),
        effects=eqn.effects & body.effects,
    )


def _scalar(v: Atom, maker: dict[Var, JaxprEqn]) -> Atom:
    """The scalar that `v` is, with an axis, or else `v` itself."""
    eqn = maker.get(v) if isinstance(v, Var) else None
    if eqn is None or eqn.primitive is not broadcast_in_dim_p:
        return v
    operand: Any = eqn.invars[0]
    is_promotion = eqn.params["shape"] == (1,) and operand.aval.shape == ()
    return operand if is_promotion else v


def _with_an_axis(x: Any) -> Any:
    return x.reshape((1,)) if not x.shape else x


def _applied(function: Callable[[Any], Any], v: Var) -> tuple[list[JaxprEqn], Var]:
    """Equations that apply `function` to `v`, and their result."""
    info = DebugInfo("reshape", "reshape", (), None)
    program, _ = trace(lambda x: [function(x)], [v.aval], info)
    (operand,), (result,) = program.jaxpr.invars, program.jaxpr.outvars
    eqns = [
        e.replace(invars=[v if u is operand else u for u in e.invars])
        for e in program.eqns
    ]
    return eqns, v if result is operand else result


def _spec(aval: Any, params: dict[str, Any]) -> PartitionSpec:
    """How a value of type `aval` in the body is split over the mesh: along axis 0."""
    manual = params["newly_manual_axes"]
    varying = varying_axes(aval) if params["check_vma"] else manual
    axes = tuple(a for a in params["mesh"].axis_names if a in varying and a in manual)
    return PartitionSpec(axes) if axes else PartitionSpec()


def _global_type(eqn: JaxprEqn, aval: Any, spec: PartitionSpec) -> Any:
    """The type of a result of `eqn` that is of type `aval` in the body."""
    params = eqn.params

    def run(*operands: Any) -> Any:
        return jax.shard_map(
            lambda *xs: opaque_p.bind(*xs, out_types=(aval,)),
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=[spec],
            axis_names=set(params["newly_manual_axes"]),
            check_vma=params["check_vma"],
        )(*operands)

    info = DebugInfo("shard_map", "shard_map", (), None)
    traced, _ = trace(run, [v.aval for v in eqn.invars], info)
    return traced.out_avals[0]
