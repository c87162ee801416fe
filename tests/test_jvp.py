"""Forward mode: `jax.jvp`."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import (
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

FORWARD = [
    name for name, problem in PROBLEMS.items() if problem.thorough and problem.forward
]


def values_and_tangents(name, transformation):
    fun, args = pure(name, transformation)

    def run(args):
        return jax.jvp(fun, (args,), (directions(args),))

    return run, args


@cache
def expected(name):
    run, args = values_and_tangents(name, unchanged)
    return compiled(run)(args)


@pytest.mark.parametrize(("name", "policy"), some_policies(FORWARD, offset=2))
def test_jvp(name, policy):
    run, args = values_and_tangents(name, checkpoint_with(policy))
    assert_close(compiled(run)(args), expected(name), PROBLEMS[name].tolerance)


@pytest.mark.parametrize(
    ("name", "policy"),
    some_policies(["mlp", "while_loop", "scan", "integers_and_bools"], offset=6),
)
def test_jvp_eager(name, policy):
    run, args = values_and_tangents(name, checkpoint_with(policy))
    assert_close(run(args), expected(name), PROBLEMS[name].tolerance)


def test_float0_tangents(key):
    @remat.checkpoint
    def f(x, n, key):
        return jnp.sin(x) * n.astype(x.dtype), n + 1, jax.random.split(key)

    primals = normal(3), jnp.int32(2), key
    zero = np.zeros((), jax.dtypes.float0)
    tangents = normal(3, seed=1), zero, zero
    outs, out_tangents = jax.jvp(f, primals, tangents)
    expected = jax.jvp(f.__wrapped__, primals, tangents)
    assert_close(outs, expected[0], 1e-6)
    assert_close(out_tangents[0], expected[1][0], 1e-6)
    assert [t.dtype for t in out_tangents[1:]] == [jax.dtypes.float0] * 2
    assert [t.shape for t in out_tangents[1:]] == [(), (2,)]


@pytest.mark.parametrize("argnum", [0, 1])
def test_tangent_of_one_argument_alone(argnum):
    """The other has a symbolic zero."""
    args = [normal(3, 3), normal(2, 3)]

    def f(w, x):
        y = jnp.sin(x @ w)
        return y, w, jnp.exp(x)

    def derivative(f):
        def of_one(arg):
            return f(*(arg if i == argnum else a for i, a in enumerate(args)))

        return jax.jit(lambda x: jax.jvp(of_one, (x,), (jnp.cos(x),)))

    actual, expected = derivative(remat.checkpoint(f)), derivative(f)
    assert_close(actual(args[argnum]), expected(args[argnum]), 1e-5)


@pytest.mark.parametrize("transform", [unchanged, jax.jit])
def test_custom_vjp_has_no_forward_mode(transform):
    fun, args = PROBLEMS["custom_vjp"].make(remat.checkpoint)
    x, w, n = args

    def run(x):
        return jax.jvp(lambda x: fun(x, w, n), (x,), (jnp.ones(3),))

    with pytest.raises(TypeError, match="custom_vjp"):
        transform(run)(x)
