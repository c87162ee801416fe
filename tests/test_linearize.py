"""`jax.linearize`, and the transpose of what it gives."""

from functools import cache

import jax
import jax.numpy as jnp
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

BOTH = [name for name, p in PROBLEMS.items() if p.thorough and p.forward and p.reverse]


def linearized(name, transformation):
    fun, args = pure(name, transformation)

    def run(args):
        outs, linear_map = jax.linearize(fun, args)
        tangents = directions(args, seed=1)
        transpose = jax.linear_transpose(linear_map, tangents)
        return {
            "values": outs,
            "first": linear_map(directions(args)),
            "second": linear_map(tangents),
            "transpose": transpose(directions(outs)),
        }

    return run, args


@cache
def expected(name):
    run, args = linearized(name, unchanged)
    return compiled(run)(args)


@pytest.mark.parametrize(("name", "policy"), some_policies(BOTH, offset=4, half=1))
def test_linearize(name, policy):
    run, args = linearized(name, checkpoint_with(policy))
    assert_close(compiled(run)(args), expected(name), PROBLEMS[name].tolerance)


@pytest.mark.parametrize(
    ("name", "policy"), some_policies(["mlp", "scan", "cond"], offset=7)
)
def test_linearize_eager(name, policy):
    run, args = linearized(name, checkpoint_with(policy))
    assert_close(run(args), expected(name), PROBLEMS[name].tolerance)


def test_linear_function_is_transposed():
    w = normal(3, 2)
    f = remat.checkpoint(lambda x: {"y": x @ w, "z": -x})
    ct = {"y": normal(2), "z": normal(3)}
    (actual,) = jax.linear_transpose(f, normal(3))(ct)
    assert_close(actual, ct["y"] @ w.T - ct["z"], 1e-5)


def test_linear_function_of_some_arguments_is_transposed():
    @remat.checkpoint
    def f(w, x):
        return x @ jnp.sin(w)

    w, ct = normal(3, 2), normal(2)
    for transform in (unchanged, jax.jit):
        transposed = jax.linear_transpose(lambda x: f(w, x), normal(3))
        assert_close(transform(transposed)(ct), (ct @ jnp.sin(w).T,), 1e-5)


def test_linearize_has_aux():
    @remat.checkpoint
    def f(x):
        y = jnp.sin(x)
        return jnp.exp(y), {"y": y, "n": jnp.int32(1)}

    x, t = normal(3), normal(3, seed=1)
    value, linear_map, aux = jax.linearize(f, x, has_aux=True)
    plain_value, plain_map, plain_aux = jax.linearize(f.__wrapped__, x, has_aux=True)
    actual = value, linear_map(t), aux
    assert_close(actual, (plain_value, plain_map(t), plain_aux), 1e-5)
