"""Loops and branches whose bodies are checkpoints, so that a policy reaches into them.

Linearizing such a loop then stacks what the policy saves in an iteration and what the
iteration starts from, and recomputes the rest iteration by iteration.

A branch is recomputed just in time too, as long as nothing else needs its results
again. Else it would be evaluated once for those and once more for its own derivative.
Then the branch stays as it is: recomputed once, as a whole, it returns all that is
needed of it.
"""

from functools import lru_cache

from jax.extend.core import Var
from jax.extend.core.primitives import cond_p, scan_p

from remat._control_flow.nested import is_opened
from remat._flatten import flatten
from remat._jax import ClosedJaxpr, JaxprEqn, build_jaxpr, new_equation
from remat._policies import Policy
from remat._primitive import remat_p


@lru_cache(maxsize=256)
def with_checkpointed_bodies(
    program: ClosedJaxpr, policy: Policy | None, keep_apart: bool, branches: bool
) -> ClosedJaxpr:
    """`program` with the bodies of its loops checkpointed by `policy`.

    Bodies that are checkpoints already keep the policy that they have.

    Args:
        program: calls inlined.
        policy: the policy of the checkpoint that evaluates it.
        keep_apart: whether recomputation is kept apart from the first computation.
        branches: whether branches are checkpointed too, or only the loops in them.
    """

    def rewritten(eqn: JaxprEqn) -> JaxprEqn:
        params = eqn.params
        if eqn.primitive is scan_p:
            body = _checkpointed(params["jaxpr"], policy, keep_apart)
            return eqn.replace(params=dict(params, jaxpr=body))
        if eqn.primitive is cond_p:
            rewritten_branches = tuple(
                _checkpointed(branch, policy, keep_apart)
                if branches
                else with_checkpointed_bodies(
                    flatten(branch), policy, keep_apart, branches
                )
                for branch in params["branches"]
            )
            return eqn.replace(params=dict(params, branches=rewritten_branches))
        return eqn

    eqns = [rewritten(eqn) for eqn in program.eqns]
    if all(new is old for new, old in zip(eqns, program.eqns, strict=True)):
        return program
    jaxpr = program.jaxpr
    return build_jaxpr(jaxpr.invars, jaxpr.outvars, eqns, like=jaxpr)


@lru_cache(maxsize=1024)
def _checkpointed(
    body: ClosedJaxpr, policy: Policy | None, keep_apart: bool
) -> ClosedJaxpr:
    """A program that is one call of `body`."""
    body = flatten(body)
    if not body.eqns or (len(body.eqns) == 1 and is_opened(body.eqns[0])):
        return body
    assert not body.consts
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
