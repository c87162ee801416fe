"""Mutable arrays (`jax.new_ref`) that a checkpointed function makes for itself.

Refs that it is given or closes over are refused, see `test_errors`. Where JAX can't
differentiate or batch the undecorated function (branches that write, loops eagerly in
a rule), the function without Refs is what is compared with.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counted, runs_of
from jax import lax
from problems import assert_close, compiled, normal

import remat
from remat import checkpoint_name, policies

new_ref = jax.new_ref  # pyright: ignore[reportAttributeAccessIssue]
X = jnp.array([1.0, 2.0, 3.0])


def written(x):
    ref = new_ref(jnp.zeros_like(x))
    ref[...] = 2.0 * jnp.sin(x)
    ref[0] = ref[1] * x[0]
    return jnp.sum(jnp.sin(ref[...]))


def written_pure(x):
    y = 2.0 * jnp.sin(x)
    return jnp.sum(jnp.sin(y.at[0].set(y[1] * x[0])))


def made_in_each_iteration(x):
    def step(carry, x):
        ref = new_ref(carry)
        ref[...] = jnp.sin(ref[...]) * x
        return ref[...], ref[...]

    carry, ys = lax.scan(step, 1.0, x)
    return carry + ys.sum()


def written_by_iterations(x):
    ref = new_ref(jnp.zeros_like(x))

    def step(carry, i):
        ref[i] = jnp.sin(carry) * x[i]
        return ref[i], None

    carry, _ = lax.scan(step, 1.0, jnp.arange(3))
    return carry + jnp.sum(ref[...])


def iterations_pure(x):
    carry, ys = lax.scan(lambda c, x: (jnp.sin(c) * x,) * 2, 1.0, x)
    return carry + ys.sum()


def written_by_a_branch(x):
    ref = new_ref(x)

    def write():
        ref[...] = jnp.sin(ref[...])

    lax.cond(x[0] > 0, write, lambda: None)
    return jnp.sum(ref[...])


def added_to_by_fori_loop(x):
    ref = new_ref(jnp.zeros(()))

    def body(i, carry):
        ref[...] += jnp.sin(x[i])
        return carry

    lax.fori_loop(0, 3, body, 0)
    return ref[...]


def written_by_a_call(x):
    ref = new_ref(x)

    @jax.jit
    def write():
        ref[...] = jnp.sin(x)

    write()
    write()
    return jnp.sum(ref[...])


def written_by_a_checkpoint_of_jax(x):
    ref = new_ref(x)

    @jax.checkpoint
    def write(x):
        ref[...] = jnp.sin(x)

    write(x)
    return jnp.sum(ref[...])


def sum_of_sines(x):
    return jnp.sum(jnp.sin(x))


def made_in_nested_checkpoints(x):
    inner = remat.checkpoint(written)
    return jnp.sin(inner(x)) * jax.checkpoint(written)(jnp.exp(x))


def nested_pure(x):
    return jnp.sin(written_pure(x)) * written_pure(jnp.exp(x))


def sine_by_ref(x):
    ref = new_ref(x)
    ref[...] = jnp.sin(ref[...])
    return ref[...]


@jax.custom_jvp
def own_jvp(x):
    return sine_by_ref(x)


@own_jvp.defjvp
def own_jvp_rule(primals, tangents):
    (x,), (t,) = primals, tangents
    return own_jvp(x), sine_by_ref(x + jnp.pi / 2) * t


@jax.custom_vjp
def own_vjp(x):
    return sine_by_ref(x)


def own_vjp_backward(residual, ct):
    ref = new_ref(ct)
    ref[...] = residual * ref[...]
    return (ref[...],)


own_vjp.defvjp(lambda x: (own_vjp(x), sine_by_ref(x + jnp.pi / 2)), own_vjp_backward)


def made_in_derivative_rules(x):
    def step(carry, x):
        return own_vjp(carry * x), own_jvp(carry)

    carry, ys = lax.scan(step, 1.0, jnp.exp(x))
    return carry + jnp.sum(ys) + jnp.sum(own_vjp(own_jvp(x)))


def rules_pure(x):
    def step(carry, x):
        return jnp.sin(carry * x), jnp.sin(carry)

    carry, ys = lax.scan(step, 1.0, jnp.exp(x))
    return carry + jnp.sum(ys) + jnp.sum(jnp.sin(jnp.sin(x)))


def made_under_vmap(x):
    return jnp.sum(jax.vmap(sine_by_ref)(x))


# Each with the same function without Refs.
FUNCTIONS = {
    written: written_pure,
    made_in_each_iteration: iterations_pure,
    written_by_iterations: iterations_pure,
    written_by_a_branch: sum_of_sines,
    added_to_by_fori_loop: sum_of_sines,
    written_by_a_call: sum_of_sines,
    written_by_a_checkpoint_of_jax: sum_of_sines,
    made_in_nested_checkpoints: nested_pure,
    made_in_derivative_rules: rules_pure,
    made_under_vmap: sum_of_sines,
}


@pytest.mark.parametrize("fun", FUNCTIONS)
def test_value_and_gradient(fun):
    pure = FUNCTIONS[fun]
    policy = policies.everything_saveable
    checkpointed = remat.checkpoint(fun, policy=policy)
    expected = compiled(jax.value_and_grad(pure))(X)
    assert_close(compiled(jax.value_and_grad(checkpointed))(X), expected, 1e-5)


@pytest.mark.parametrize("fun", [f for f in FUNCTIONS if f != made_in_derivative_rules])
def test_other_transformations(fun):
    def transformed(fun):
        def derivatives(x, xs):
            hvp = jax.jvp(jax.grad(fun), (x,), (x,))
            return jax.jvp(fun, (x,), (x,)), hvp, jax.vmap(jax.grad(fun))(xs)

        return compiled(derivatives)(X, jnp.stack([X, 0.5 * X]))

    expected = transformed(FUNCTIONS[fun])
    assert_close(transformed(remat.checkpoint(fun)), expected, 1e-4)


def test_outside_of_jit():
    expected = jax.grad(written_pure)(X)
    assert_close(jax.grad(remat.checkpoint(written))(X), expected, 1e-5)
    assert_close(remat.checkpoint(written)(X), written_pure(X), 1e-5)


@pytest.mark.parametrize(
    ("policy", "again"),
    [(None, 1), (policies.save_only_these_names("y"), 0)],
    ids=str,
)
def test_what_is_written_is_recomputed_unless_it_is_saved(policy, again):
    @partial(remat.checkpoint, policy=policy)
    def fun(x):
        ref = new_ref(x)
        for _ in range(3):
            ref[...] = checkpoint_name(counted(jnp.sin(ref[...])), "y")
        return jnp.sum(ref[...] ** 2)

    x = normal(3)
    assert runs_of(jax.value_and_grad(fun), x) == 3 + 3 * again
    saved = [r for r in remat.saved_residuals(fun, x) if r.name == "y"]
    assert len(saved) == (0 if again else 3)


def test_what_is_read_may_be_printed():
    seen = []

    @remat.checkpoint
    def fun(x):
        ref = new_ref(x)
        ref[...] = jnp.sin(ref[...])
        jax.debug.callback(lambda y: seen.append(np.asarray(y)), ref[...])
        ref[...] = jnp.sin(ref[...])
        return jnp.sum(ref[...])

    jax.grad(fun)(X)
    jax.effects_barrier()
    (y,) = seen
    np.testing.assert_allclose(y, jnp.sin(X), rtol=1e-6)


# What is refused.


OUTER = new_ref(X)


@jax.custom_vjp
def reading_rule(x):
    return jnp.sin(x)


reading_rule.defvjp(
    lambda x: (jnp.sin(x), OUTER[...]), lambda residual, ct: (residual * ct,)
)


@jax.custom_vjp
def writing_rule(x):
    return jnp.sin(x)


def write_cotangent(residual, ct):
    OUTER[...] = ct
    return (residual * ct,)


writing_rule.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), write_cotangent)


@pytest.mark.parametrize("rule", [reading_rule, writing_rule])
def test_rule_with_a_ref_from_outside(rule):
    @remat.checkpoint
    def fun(x):
        return jnp.sum(rule(x))

    with pytest.raises(
        remat.UnsupportedError,
        match=r"fun at .*, given to remat\.checkpoint, has a derivative rule that "
        r"reads or writes a mutable Ref\. .* Pass the Ref's value instead",
    ):
        jax.grad(fun)(X)
    np.testing.assert_array_equal(OUTER[...], X)  # and nothing was done


@jax.custom_vjp
def rule_with_a_ref(x, ref):
    ref[...] = jnp.sin(x)
    return ref[...]


rule_with_a_ref.defvjp(
    lambda x, ref: (rule_with_a_ref(x, ref), jnp.cos(x)),
    lambda residual, ct: (residual * ct, None),
)


@pytest.mark.parametrize("transform", [lambda f: f, jax.grad])
def test_ref_given_to_a_function_with_a_rule(transform):
    @remat.checkpoint
    def fun(x):
        return jnp.sum(rule_with_a_ref(x, new_ref(x)))

    with pytest.raises(remat.UnsupportedError, match="reads or writes a mutable Ref"):
        transform(fun)(X)
