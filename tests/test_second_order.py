"""Derivatives of derivatives, which are rematerialized too."""

from functools import cache

import jax
import jax.numpy as jnp
import pytest
from counting import counted, equations, evaluations, runs_of
from problems import (
    POLICIES,
    PROBLEMS,
    assert_close,
    checkpoint_with,
    compiled,
    directions,
    normal,
    scalar_loss,
    some_policies,
    unchanged,
)

import remat
from remat import policies

TWICE = [name for name, p in PROBLEMS.items() if p.thorough and p.twice and p.reverse]


def second_derivative(name, composition, transformation):
    fun, args = scalar_loss(name, transformation)

    def run(args):
        gradient = jax.grad(fun)
        tangents = directions(args)

        def gradient_along(args):
            return sum(
                jnp.real(jnp.vdot(t, g)).astype(jnp.float32)
                for t, g in zip(tangents, gradient(args), strict=True)
            )

        def tangent(args):
            return jax.jvp(fun, (args,), (tangents,))[1]

        if composition == "grad of grad":
            return jax.grad(gradient_along)(args)
        if composition == "vjp of jvp":
            return jax.grad(tangent)(args)
        assert composition == "jvp of vjp"
        return jax.jvp(gradient, (args,), (tangents,))

    return run, args


COMPOSITIONS = ["jvp of vjp", "vjp of jvp", "grad of grad"]


def some_compositions(names, offset):
    """One for each problem, in turn; all for the problem that is listed first."""
    cases = []
    for i, pair in enumerate(some_policies(names, offset, half=1)):
        name, policy = pair.values
        possible = COMPOSITIONS if PROBLEMS[name].forward else COMPOSITIONS[2:]
        chosen = possible if i == 0 else [possible[i % len(possible)]]
        cases += [pytest.param(name, policy, c, id=f"{pair.id}-{c}") for c in chosen]
    return cases


@cache
def expected(name, composition):
    run, args = second_derivative(name, composition, unchanged)
    return compiled(run)(args)


@pytest.mark.parametrize(("name", "policy", "composition"), some_compositions(TWICE, 6))
def test_second_derivatives(name, policy, composition):
    run, args = second_derivative(name, composition, checkpoint_with(policy))
    # Errors grow with each derivative.
    tolerance = 10 * PROBLEMS[name].tolerance
    assert_close(compiled(run)(args), expected(name, composition), tolerance)


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("name", ["closed_over_tracers", "nested_checkpoint"])
def test_second_derivatives_eager(name, composition):
    run, args = second_derivative(name, composition, remat.checkpoint)
    tolerance = 10 * PROBLEMS[name].tolerance
    assert_close(run(args), expected(name, composition), tolerance)


def smooth(x):
    y = remat.checkpoint_name(jnp.sin(jnp.sin(x) * x[::-1]), "a")
    return jnp.tanh(y) * jnp.cos(x)


def scalar(x):
    return smooth(x).sum()


HESSIANS = {
    "forward over reverse": jax.hessian,
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f)),
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f)),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f)),
}


@pytest.mark.parametrize("policy", ["none", "everything", "names_or_dots", "cheap"])
def test_hessians(policy):
    def run(f):
        return compiled(lambda x: {name: h(f)(x) for name, h in HESSIANS.items()})

    checkpointed = checkpoint_with(policy)(scalar)
    assert_close(run(checkpointed)(normal(3)), run(scalar)(normal(3)), 1e-4)


@pytest.mark.parametrize("hessian", HESSIANS)
def test_hessians_eager(hessian):
    f = HESSIANS[hessian]
    expected = compiled(f(scalar))(normal(3))
    assert_close(f(remat.checkpoint(scalar))(normal(3)), expected, 1e-4)


def test_gradient_of_gradient():
    def second(f):
        gradient = jax.grad(lambda x: jnp.sin(jax.grad(f)(x)).sum())
        return compiled(gradient)(normal(3))

    assert_close(second(remat.checkpoint(scalar)), second(scalar), 1e-4)


@pytest.mark.parametrize("jacobian", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("policy", ["none", "everything", "names_or_dots", "cheap"])
def test_jacobians(policy, jacobian):
    def f(x, tree):
        return {"y": smooth(x) * tree["w"], "z": (jnp.exp(tree["w"]),)}

    args = normal(3), {"w": normal(3, seed=1)}
    actual = compiled(jacobian(checkpoint_with(policy)(f), (0, 1)))(*args)
    assert_close(actual, compiled(jacobian(f, (0, 1)))(*args), 1e-5)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_higher_orders(order):
    def f(x):
        return jnp.sin(jnp.sin(x) * x)

    actual, expected = remat.checkpoint(f), f
    for _ in range(order):
        actual, expected = jax.grad(actual), jax.grad(expected)
    assert_close(jax.jit(actual)(0.7), jax.jit(expected)(0.7), 1e-5)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_higher_orders_repeat_evaluations(order):
    """Nothing is saved at any order, so each order evaluates anew what it reads."""

    def derivative(f):
        for _ in range(order):
            f = jax.grad(f)
        return f

    def f(x):
        return counted(counted(x))

    plain = evaluations(derivative(f), 0.5)
    assert plain == 2
    nothing = evaluations(derivative(remat.checkpoint(f)), 0.5)
    everything = evaluations(
        derivative(remat.checkpoint(f, policy=policies.everything_saveable)), 0.5
    )
    assert everything == 2
    assert nothing >= 2 * (order + 1)


def test_second_order_repeats_evaluations_when_it_runs():
    def second(f):
        return jax.value_and_grad(lambda x: jnp.sin(jax.value_and_grad(f)(x)[1]))

    def f(x):
        return counted(counted(x))

    assert runs_of(second(f), 0.5) == 2
    assert runs_of(second(remat.checkpoint(f)), 0.5) >= 4


@pytest.mark.parametrize("policy", POLICIES)
def test_second_order_saves_what_the_policy_allows(policy):
    gradient = jax.grad(checkpoint_with(policy)(scalar))

    def residuals(x):
        return jax.tree.leaves(jax.vjp(gradient, x)[1])

    jaxpr = jax.make_jaxpr(residuals)(normal(3)).jaxpr
    saved = [v for v in jaxpr.outvars if v not in jaxpr.invars and v.aval.shape]
    assert bool(saved) == (policy in ("everything", "names_or_dots", "cheap"))


def test_second_order_stages_each_backward_pass():
    f = remat.checkpoint(scalar)
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: jnp.sin(jax.grad(f)(x)).sum()))(normal(3))
    staged = [e for e in equations(jaxpr) if e.params.get("staged")]
    assert len(staged) >= 2


def test_gradient_inside_a_checkpointed_function():
    """A physics-like loss: the function under the checkpoint differentiates."""

    def energy(w, x):
        return jnp.tanh(jnp.sin(x @ w)).sum()

    def loss(w, x):
        force = jax.grad(energy, 1)(w, x)
        laplacian = jnp.trace(jax.hessian(energy, 1)(w, x))
        return (force**2).sum() + laplacian

    w, x = normal(3, 3), normal(3)
    actual = jax.jit(jax.grad(remat.checkpoint(loss)))(w, x)
    assert_close(actual, jax.jit(jax.grad(loss))(w, x), 1e-4)


def test_mixed_partial_derivatives():
    f = remat.checkpoint(lambda x, y: jnp.sin(jnp.sin(x) * jnp.exp(y)))
    actual = jax.grad(jax.grad(f, 0), 1)(0.3, 0.7)
    expected = jax.grad(jax.grad(f.__wrapped__, 0), 1)(0.3, 0.7)
    assert_close(actual, expected, 1e-5)


def test_hessian_vector_product_in_a_scan():
    f = remat.checkpoint(scalar)

    def steps(f, x):
        def step(v, _):
            return jax.jvp(jax.grad(f), (x,), (v,))[1], None

        return jax.lax.scan(step, jnp.ones(3), None, length=3)[0]

    x = normal(3)
    actual = jax.jit(lambda x: steps(f, x))(x)
    assert_close(actual, jax.jit(lambda x: steps(scalar, x))(x), 1e-4)
