"""Loops and branches whose bodies are checkpoints, so that a policy reaches into them.

Linearizing such a loop then stacks what the policy saves in an iteration and what the
iteration starts from, and recomputes the rest iteration by iteration.

What is evaluated once (a branch, the body of a `shard_map`) is recomputed just in time
too, as long as nothing else needs its results again. Else it would be evaluated once
for those and once more for its own derivative. Then it stays as it is: recomputed once,
as a whole, it returns all that is needed of it.
"""

from functools import lru_cache

from jax.extend.core import Var
from jax.extend.core.primitives import cond_p, scan_p

from remat._flatten import flatten
from remat._jax import (
    ClosedJaxpr,
    JaxprEqn,
    build_jaxpr,
    is_shard_map,
    new_equation,
    shard_map_body,
)
from remat._policies import Policy, everything_saveable
from remat._primitive import remat_p


@lru_cache(maxsize=256)
def with_checkpointed_bodies(
    program: ClosedJaxpr, policy: Policy | None, keep_apart: bool, loops_only: bool
) -> ClosedJaxpr:
    """`program` with the programs in its equations checkpointed by `policy`.

    Bodies that are checkpoints already keep the policy that they have.

    Args:
        program: calls inlined.
        policy: the policy of the checkpoint that evaluates it.
        keep_apart: whether recomputation is kept apart from the first computation.
        loops_only: whether what is evaluated once (a branch, the body of a
            `shard_map`) is not checkpointed too, but only the loops in it.
    """
    if policy == everything_saveable:
        return program  # nothing is recomputed

    def once(body: ClosedJaxpr) -> ClosedJaxpr:
        if loops_only:
            return with_checkpointed_bodies(
                flatten(body), policy, keep_apart, loops_only
            )
        return _checkpointed(body, policy, keep_apart)

    def rewritten(eqn: JaxprEqn) -> JaxprEqn:
        params = eqn.params
        if eqn.primitive is scan_p:
            body = _checkpointed(params["jaxpr"], policy, keep_apart)
            return eqn.replace(params=dict(params, jaxpr=body))
        if is_shard_map(eqn):
            body = once(shard_map_body(eqn))
            return eqn.replace(params=dict(params, jaxpr=body.jaxpr))
        if eqn.primitive is cond_p:
            branches = tuple(once(branch) for branch in params["branches"])
            return eqn.replace(params=dict(params, branches=branches))
        return eqn

    eqns = [rewritten(eqn) for eqn in program.eqns]
    if all(new is old for new, old in zip(eqns, program.eqns, strict=True)):
        return program
    jaxpr = program.jaxpr
    return build_jaxpr(jaxpr.invars, jaxpr.outvars, eqns, like=jaxpr)


# What there is around the checkpoint of a body that has been differentiated or
# transposed. The derivatives of these need nothing saved.
_WITHOUT_RESIDUALS = frozenset(
    [
        "add_any",
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "neg",
        "pvary",
        "psum",
        "psum_invariant",
        "reduce_sum",
        "reshape",
        "squeeze",
    ]
)


def _is_checkpointed(body: ClosedJaxpr) -> bool:
    """Whether `body` has nothing to save but in checkpoints."""
    others = (e.primitive.name for e in body.eqns if e.primitive is not remat_p)
    return _WITHOUT_RESIDUALS.issuperset(others)


@lru_cache(maxsize=1024)
def _checkpointed(
    body: ClosedJaxpr, policy: Policy | None, keep_apart: bool
) -> ClosedJaxpr:
    """A program that is one call of `body`."""
    body = flatten(body)
    if body.consts or _is_checkpointed(body):
        return body
    jaxpr = body.jaxpr
    invars = [Var(aval) for aval in body.in_avals]
    outvars = [Var(aval) for aval in body.out_avals]
    call = new_equation(
        remat_p,
        invars,
        outvars,
        {
            "jaxpr": body,
            "policy": policy,
            "prevent_cse": (keep_apart,) * len(invars),
            "num_linear": 0,
            "staged": False,
            "check_names": False,
        },
        like=body.eqns[0],
        effects=jaxpr.effects,
    )
    return build_jaxpr(invars, outvars, [call], like=jaxpr)
