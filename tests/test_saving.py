"""What the forward evaluation saves for the backward pass."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counted, equations, evaluations, runs_of
from jax.extend.core import Literal
from problems import PROBLEMS, normal, pure

import remat
from remat import checkpoint_name, policies

ARGUMENT = "argument"


def saved(fun, *args):
    """What `jax.vjp` keeps, as the names of what made it, sorted.

    A value is called by its name if it has one, else by its primitive.
    """

    def residuals(*args):
        return jax.tree.leaves(jax.vjp(fun, *args)[1])

    jaxpr = jax.make_jaxpr(residuals)(*args).jaxpr
    labels = [label(v, jaxpr) for v in dict.fromkeys(jaxpr.outvars)]
    return sorted(x for x in labels if x != ARGUMENT)


def label(v, jaxpr):
    if isinstance(v, Literal):
        return "literal"
    if v in jaxpr.invars or v in jaxpr.constvars:
        return ARGUMENT
    eqn = next(e for e in jaxpr.eqns if v in e.outvars)
    if eqn.primitive.name == "remat":
        inner = eqn.params["jaxpr"].jaxpr
        return label(inner.outvars[eqn.outvars.index(v)], inner)
    return eqn.params["name"] if eqn.primitive.name == "name" else eqn.primitive.name


def network(w, x):
    h = checkpoint_name(x @ w, "h")
    y = checkpoint_name(jnp.sin(h), "y")
    z = jnp.einsum("bi,bi->b", y, jnp.exp(h))  # a product with a batch dimension
    unused = checkpoint_name(jnp.exp(x), "unused")
    return jnp.sin(z), unused.astype(jnp.int32)


ARGS = normal(3, 3), normal(2, 3)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (None, []),
        (policies.nothing_saveable, []),
        # The derivative of sin reads a cosine, that of exp its result.
        (policies.everything_saveable, ["cos", "cos", "exp", "y"]),
        (policies.dots_saveable, ["dot_general", "dot_general"]),
        (policies.dots_with_no_batch_dims_saveable, ["dot_general"]),
        (policies.save_only_these_names("h"), ["h"]),
        (policies.save_only_these_names("h", "y"), ["h", "y"]),
        (policies.save_any_names_but_these("h"), ["y"]),
        (policies.save_any_names_but_these("y"), ["h"]),
        (policies.save_any_names_but_these(), ["h", "y"]),
        (
            policies.save_from_both_policies(
                policies.save_only_these_names("y"),
                policies.dots_with_no_batch_dims_saveable,
            ),
            ["dot_general", "y"],
        ),
        (lambda prim, *avals, **params: prim.name == "exp", ["exp"]),
        (lambda prim, *avals, **params: prim.name == "tan", []),
        (jax.checkpoint_policies.nothing_saveable, []),
        (jax.checkpoint_policies.everything_saveable, ["cos", "cos", "exp", "y"]),
        (jax.checkpoint_policies.dots_saveable, ["dot_general", "dot_general"]),
        (jax.checkpoint_policies.dots_with_no_batch_dims_saveable, ["dot_general"]),
        (jax.checkpoint_policies.save_only_these_names("h"), ["h"]),
        (jax.checkpoint_policies.save_any_names_but_these("y"), ["h"]),
        (
            jax.checkpoint_policies.save_from_both_policies(
                jax.checkpoint_policies.save_only_these_names("y"),
                jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
            ),
            ["dot_general", "y"],
        ),
    ],
)
def test_policy(policy, expected):
    assert saved(remat.checkpoint(network, policy=policy), *ARGS) == expected


NO_POLICY = [
    name
    for name in PROBLEMS
    # The checkpoint is only a part of these.
    if name not in ("closed_over_tracers", "inside_scan", "inside_cond", "chain",
                    "halving", "inside_shard_map", "keyword_arguments")
    and PROBLEMS[name].reverse
]  # fmt: skip


@pytest.mark.parametrize("name", NO_POLICY)
def test_nothing_but_the_arguments_without_a_policy(name):
    fun, args = pure(name, remat.checkpoint)

    def residuals(args):
        outs, pullback = jax.vjp(fun, args)
        return jax.tree.leaves(pullback), outs

    jaxpr = jax.make_jaxpr(residuals)(args).jaxpr
    num_outs = len(jax.eval_shape(fun, args))
    kept = dict.fromkeys(jaxpr.outvars[: len(jaxpr.outvars) - num_outs])
    made = [v for eqn in jaxpr.eqns for v in eqn.outvars]
    assert not [v for v in kept if v in made]


def test_effects_are_not_repeated():
    @remat.checkpoint
    def f(x):
        y = jnp.sin(x)
        jax.debug.print("{}", y)
        return jnp.exp(y)

    jaxpr = jax.make_jaxpr(jax.grad(f))(1.0)
    names = [eqn.primitive.name for eqn in equations(jaxpr)]
    assert len([name for name in names if name.startswith("debug")]) == 1


def test_saved_outputs_are_not_returned_twice():
    @partial(remat.checkpoint, policy=policies.everything_saveable)
    def f(x):
        y = jnp.exp(x)
        return y, y

    jaxpr = jax.make_jaxpr(lambda x: jax.vjp(f, x)[1])(normal(3)).jaxpr
    (eqn,) = [e for e in jaxpr.eqns if e.primitive.name == "remat"]
    assert len(eqn.outvars) == 2


def test_only_what_the_backward_needs():
    """A policy is a permission: of sin(x @ w) + x @ v only the first is needed."""

    @partial(remat.checkpoint, policy=policies.dots_saveable)
    def f(w, v, x):
        return jnp.sin(x @ w) + x @ v

    assert saved(f, normal(3, 3), normal(3, 3), normal(2, 3)) == ["dot_general"]


def test_only_what_the_backward_of_these_arguments_needs():
    @partial(remat.checkpoint, policy=policies.everything_saveable)
    def f(x, y):
        return jnp.exp(x) * jnp.sin(y)

    x, y = normal(3), normal(3, seed=1)
    assert saved(lambda x: f(x, y), x) == ["exp", "sin"]
    assert saved(lambda y: f(x, y), y) == ["cos", "exp"]
    assert saved(f, x, y) == ["cos", "exp", "sin"]


@pytest.mark.parametrize("cut", ["value", "name"])
def test_tanh_is_not_recomputed_when_its_named_result_is_saved(cut):
    """Though its derivative reads the value from before it was named."""

    @partial(remat.checkpoint, policy=policies.save_only_these_names("y"))
    def f(x):
        y = counted(jnp.sin(x))
        named = checkpoint_name(y, "y")
        return jnp.exp(named) * (y if cut == "value" else named)

    gradient = jax.value_and_grad(lambda x: f(x).sum())
    assert saved(f, normal(3)) == ["y"]
    assert evaluations(gradient, normal(3)) == runs_of(gradient, normal(3)) == 1


@pytest.mark.parametrize("names", [("a",), ("b",), ("c",), ("a", "b"), ("a", "b", "c")])
def test_value_named_twice(names):
    """Any of its names will do; `c` is a name of what is already named `a`."""

    def f(x):
        y = counted(x)
        a, b = checkpoint_name(y, "a"), checkpoint_name(y, "b")
        return jnp.sin(a) * jnp.cos(b) * checkpoint_name(a, "c")

    policy = policies.save_only_these_names(*names)
    checkpointed = remat.checkpoint(f, policy=policy)
    assert set(saved(checkpointed, normal(3))) <= set(names)
    gradient = jax.value_and_grad(lambda x: checkpointed(x).sum())
    assert evaluations(gradient, normal(3)) == 1


def test_primal_is_named_and_not_its_tangent():
    f = remat.checkpoint(lambda x: jnp.sin(checkpoint_name(jnp.sin(x), "y")))
    x = normal(3)

    def names(transformed, *args):
        jaxpr = jax.make_jaxpr(transformed)(*args)
        return [e for e in equations(jaxpr) if e.primitive.name == "name"]

    assert len(names(f, x)) == 1
    tangent = lambda x, t: jax.jvp(f.__wrapped__, (x,), (t,))  # noqa: E731
    assert len(names(tangent, x, x)) == 1
    (backward,) = (
        e
        for e in equations(jax.make_jaxpr(jax.grad(lambda x: f(x).sum()))(x))
        if e.params.get("staged")
    )
    inner = backward.params["jaxpr"].jaxpr
    depends = {inner.invars[-1]}
    for eqn in inner.eqns:
        if depends & {v for v in eqn.invars if not isinstance(v, Literal)}:
            assert eqn.primitive.name != "name"
            depends.update(eqn.outvars)
    assert inner.outvars[-1] in depends


@jax.custom_vjp
def attention_like(x):
    return counted(counted(x))


def attention_like_fwd(x):
    out = checkpoint_name(counted(x, label="slow"), "out")
    scale = checkpoint_name(jnp.sin(out), "scale")
    return counted(out), {"x": x, "pair": (out, scale)}


def attention_like_bwd(residuals, ct):
    out, scale = residuals["pair"]
    return (ct * scale * out * residuals["x"],)


attention_like.defvjp(attention_like_fwd, attention_like_bwd)


@pytest.mark.parametrize(
    ("names", "expected", "slow"),
    [
        (("out", "scale"), ["out", "scale"], 1),
        (("out",), ["out"], 1),
        (("scale",), ["scale"], 2),
    ],
)
def test_names_in_the_forward_rule_of_a_custom_vjp(names, expected, slow):
    policy = policies.save_only_these_names(*names)
    f = remat.checkpoint(lambda x: attention_like(jnp.sin(x)), policy=policy)
    assert saved(f, normal(3)) == expected
    jaxpr = jax.make_jaxpr(jax.value_and_grad(lambda x: f(x).sum()))(normal(3))
    labels = [e.params["label"] for e in equations(jaxpr) if "label" in e.params]
    assert labels.count("slow") == slow


def test_residual_smaller_than_what_it_was_made_from():
    """A policy may save the one-byte mask of a relu rather than its argument."""

    def f(w, x):
        return jnp.where(x @ w > 0, x @ w, 0.0)

    def only_bools(prim, *avals, **params):
        return prim.name == "gt"

    checkpointed = remat.checkpoint(f, policy=only_bools)

    def residuals(w, x):
        return jax.tree.leaves(jax.vjp(checkpointed, w, x)[1])

    dtypes = [r.dtype for r in jax.eval_shape(residuals, *ARGS)]
    assert dtypes.count(jnp.bool_) == 1
    assert len(dtypes) == 3
    gradient = jax.grad(lambda w, x: checkpointed(w, x).sum(), (0, 1))
    assert evaluations(gradient, *ARGS, primitive="gt") == 1


def test_policy_is_asked_with_primitive_types_and_parameters():
    asked = []

    def policy(prim, *avals, **params):
        asked.append((prim, avals, params))
        return False

    f = remat.checkpoint(lambda w, x: jnp.sin(x @ w), policy=policy)
    jax.make_jaxpr(lambda *args: jax.vjp(f, *args)[0])(*ARGS)
    by_name = {prim.name: (avals, params) for prim, avals, params in asked}
    avals, params = by_name["dot_general"]
    assert [(a.shape, a.dtype) for a in avals] == [
        ((2, 3), jnp.float32),
        ((3, 3), jnp.float32),
    ]
    assert params["dimension_numbers"] == (((1,), (0,)), ((), ()))
    assert [a.shape for a in by_name["cos"][0]] == [(2, 3)]


def test_policy_sees_inside_calls():
    """`jax.numpy` wraps much of what it does in calls."""
    inner = jax.jit(lambda w, x: jnp.sin(jnp.einsum("bi,io->bo", x, w)))

    @partial(remat.checkpoint, policy=policies.dots_saveable)
    def f(w, x):
        return jax.jit(jnp.cos)(inner(w, x))

    assert saved(f, *ARGS) == ["dot_general"]


def test_saved_inside_a_scan_body():
    policy = policies.save_only_these_names("y")

    @partial(remat.checkpoint, policy=policy)
    def body(x, w):
        y = checkpoint_name(counted(x @ w), "y")
        return jnp.sin(y), None

    def loss(x, ws):
        return jax.lax.scan(body, x, ws)[0].sum()

    args = normal(3), normal(4, 3, 3)
    assert runs_of(jax.value_and_grad(loss, (0, 1)), *args) == 4

    def residual_shapes(x, ws):
        return jax.tree.leaves(jax.vjp(loss, x, ws)[1])

    shapes = sorted(r.shape for r in jax.eval_shape(residual_shapes, *args))
    # The weights, the carry of each step and the named value of each step.
    assert [s for s in shapes if s] == [(4, 3), (4, 3), (4, 3, 3)]


def test_names_of_an_inner_function_reach_the_outer_policy():
    inner = remat.checkpoint(
        lambda x: jnp.sin(checkpoint_name(counted(x), "y")),
        policy=policies.save_only_these_names("y"),
    )

    @remat.checkpoint
    def without(x):
        return inner(jnp.exp(x))

    @partial(remat.checkpoint, policy=policies.everything_saveable)
    def everything(x):
        return inner(jnp.exp(x))

    assert saved(without, normal(3)) == []
    # What the outer one may save does include what the inner one saves.
    assert "y" in saved(everything, normal(3))
    assert saved(inner, normal(3)) == ["y"]


def test_integer_results_next_to_floats():
    @remat.checkpoint
    def f(x):
        order = jnp.argsort(x)
        return jnp.sin(x)[order], order, x > 0

    x = normal(4)
    (y, order, positive), pullback = jax.vjp(f, x)
    zeros = [np.zeros(4, jax.dtypes.float0) for _ in range(2)]
    (dx,) = pullback((jnp.ones(4), *zeros))
    np.testing.assert_array_equal(order, np.argsort(x))
    np.testing.assert_array_equal(positive, np.asarray(x) > 0)
    np.testing.assert_allclose(y, jnp.sin(x)[order], rtol=1e-6)
    np.testing.assert_allclose(dx, jnp.cos(x), rtol=1e-5)
