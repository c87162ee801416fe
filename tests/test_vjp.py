"""Reverse mode: `jax.vjp`, `jax.grad` and `jax.value_and_grad`."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from problems import (
    OPENED,
    POLICIES,
    PROBLEMS,
    assert_close,
    checkpoint_with,
    compiled,
    directions,
    normal,
    pure,
    some_policies,
    unchanged,
)

import remat

REVERSE = [name for name, problem in PROBLEMS.items() if problem.reverse]


def values_and_cotangents(name, transformation):
    fun, args = pure(name, transformation)

    def run(args):
        outs, pullback = jax.vjp(fun, args)
        return outs, pullback(directions(outs))

    return run, args


@cache
def expected(name):
    run, args = values_and_cotangents(name, unchanged)
    return compiled(run)(args)


@pytest.mark.parametrize(("name", "policy"), some_policies(set(REVERSE) - {*OPENED}))
def test_vjp(name, policy):
    run, args = values_and_cotangents(name, checkpoint_with(policy))
    assert_close(compiled(run)(args), expected(name), PROBLEMS[name].tolerance)


@pytest.mark.parametrize(("name", "policy"), some_policies(REVERSE, offset=3, half=0))
def test_vjp_eager(name, policy):
    run, args = values_and_cotangents(name, checkpoint_with(policy))
    assert_close(run(args), expected(name), PROBLEMS[name].tolerance)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", OPENED)
def test_vjp_with_every_policy(name, policy):
    run, args = values_and_cotangents(name, checkpoint_with(policy))
    assert_close(compiled(run)(args), expected(name), PROBLEMS[name].tolerance)


@pytest.mark.parametrize("argnum", [0, 1, 2])
def test_gradient_in_one_argument_alone(argnum):
    def f(w, x, y):
        hidden = jnp.sin(x @ w)
        return jnp.sum(jnp.tanh(hidden @ w) * jnp.exp(y))

    args = normal(3, 3), normal(2, 3), normal(3)
    actual = jax.jit(jax.grad(remat.checkpoint(f), argnum))(*args)
    assert_close(actual, jax.jit(jax.grad(f, argnum))(*args), 1e-5)


@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_cotangent_of_one_result_alone(position):
    """The others are symbolic zeros."""

    def f(w, x):
        y = jnp.sin(x @ w)
        return y, jnp.tanh(y @ w), x, jnp.exp(w).sum()

    def gradient(f):
        return jax.jit(jax.grad(lambda *args: jnp.sum(f(*args)[position]), (0, 1)))

    args = normal(3, 3), normal(2, 3)
    assert_close(gradient(remat.checkpoint(f))(*args), gradient(f)(*args), 1e-5)


def test_integer_argument_has_a_float0_cotangent(key):
    @remat.checkpoint
    def f(x, n, flag, key):
        noise = jax.random.normal(key, x.shape)
        return jnp.where(flag, jnp.sin(x * noise) * n.astype(x.dtype), x)

    args = normal(3), jnp.arange(3), jnp.array(True), key
    _, pullback = jax.vjp(f, *args)
    dx, dn, dflag, dkey = pullback(jnp.ones(3))
    expected = jax.vjp(f.__wrapped__, *args)[1](jnp.ones(3))
    assert_close(dx, expected[0], 1e-5)
    for ct, arg in ((dn, args[1]), (dflag, args[2]), (dkey, key)):
        assert ct.dtype == jax.dtypes.float0
        assert ct.shape == arg.shape


def test_allow_int():
    f = remat.checkpoint(lambda x, n: jnp.sum(jnp.sin(x) * n.astype(x.dtype)))
    dx, dn = jax.grad(f, (0, 1), allow_int=True)(normal(3), jnp.arange(3))
    np.testing.assert_allclose(dx, jnp.cos(normal(3)) * jnp.arange(3.0), rtol=1e-5)
    assert dn.dtype == jax.dtypes.float0


def test_has_aux():
    @remat.checkpoint
    def f(x):
        y = jnp.sin(jnp.sin(x))
        return y.sum(), {"y": y, "count": jnp.int32(3), "none": None}

    x = normal(3)
    (value, aux), dx = jax.value_and_grad(f, has_aux=True)(x)
    (value_, aux_), dx_ = jax.value_and_grad(f.__wrapped__, has_aux=True)(x)
    assert_close((value, aux, dx), (value_, aux_, dx_), 1e-5)


def test_pullback_is_called_twice():
    f = remat.checkpoint(lambda x: jnp.tanh(jnp.sin(x)))
    x = normal(3)
    _, pullback = jax.vjp(f, x)
    _, expected = jax.vjp(f.__wrapped__, x)
    for ct in (jnp.ones(3), normal(3, seed=1)):
        assert_close(pullback(ct), expected(ct), 1e-5)


def test_no_differentiable_argument_or_result():
    f = remat.checkpoint(lambda n, x: (n + 1, jnp.argmax(x)))
    (n, index), pullback = jax.vjp(f, jnp.int32(3), normal(4))
    assert (n, index) == (4, jnp.argmax(normal(4)))
    zeros = tuple(np.zeros((), jax.dtypes.float0) for _ in range(2))
    dn, dx = pullback(zeros)
    assert dn.dtype == jax.dtypes.float0
    np.testing.assert_array_equal(dx, jnp.zeros(4))


def test_function_of_no_arguments():
    w = normal(3)
    f = remat.checkpoint(lambda: jnp.sin(w))
    np.testing.assert_allclose(f(), jnp.sin(w), rtol=1e-6)

    def through_closure(w):
        return remat.checkpoint(lambda: jnp.sin(jnp.sin(w)))().sum()

    expected = jax.grad(lambda w: jnp.sin(jnp.sin(w)).sum())(w)
    np.testing.assert_allclose(jax.grad(through_closure)(w), expected, rtol=1e-5)


def test_callback_with_an_effect_happens_once_at_any_order():
    calls = []

    def on_host(x):
        calls.append(x)
        return np.float32(2.0)

    @remat.checkpoint
    def f(x):
        result = jax.ShapeDtypeStruct((), jnp.float32)
        scale = io_callback(on_host, result, jax.lax.stop_gradient(x))
        return jnp.sin(jnp.sin(x) * scale)

    def expected(x):
        return jnp.sin(jnp.sin(x) * 2.0)

    for derivative in (jax.grad, lambda f: jax.grad(jax.grad(f))):
        for transform in (unchanged, jax.jit):
            calls.clear()
            actual = transform(derivative(f))(0.5)
            jax.effects_barrier()
            assert len(calls) == 1
            assert_close(actual, derivative(expected)(0.5), 1e-5)


@pytest.mark.parametrize("policy", ["none", "dots"])
def test_explicit_sharding(policy):
    """Gradients are sharded as those of the undecorated function are."""
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((2,), ("i",), explicit, devices=jax.devices()[:2])

    def f(w, x):
        return jnp.sin(jnp.sin(x @ w)).sum()

    with jax.set_mesh(mesh):
        w = normal(3, 3)
        x = jax.device_put(normal(4, 3), jax.sharding.PartitionSpec("i"))
        for transform in (unchanged, jax.jit):
            checkpointed = checkpoint_with(policy)(f)
            actual = transform(jax.grad(checkpointed, (0, 1)))(w, x)
            plain = jax.jit(jax.grad(f, (0, 1)))(w, x)
            assert_close(actual, plain, 1e-5)
            assert [a.sharding for a in actual] == [e.sharding for e in plain]


@pytest.mark.parametrize("policy", [None, remat.policies.everything_saveable], ids=str)
def test_argument_that_no_result_depends_on_differentiably(policy):
    def of_scan(checkpoint, x):
        _, ys = jax.lax.scan(lambda c, _: (jnp.sin(c), c), x, None, length=3)

        @checkpoint
        def stopped(x, y):
            return jnp.sin(x) + jax.lax.stop_gradient(y), 2.0 * jax.lax.stop_gradient(y)

        return jnp.sum(stopped(x, ys[0])[0])

    x = normal(3)
    actual = jax.grad(partial(of_scan, partial(remat.checkpoint, policy=policy)))(x)
    assert_close(actual, jax.grad(partial(of_scan, unchanged))(x), 1e-6)
