"""Functions that close over arrays, in calls, loops and branches of a checkpoint."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counted, runs_of
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from problems import assert_close, compiled, normal

import remat
from remat import checkpoint_name, policies

X = normal(4, seed=1)
MATRIX = normal(4, 4, seed=2)
VECTOR = np.asarray(normal(4, seed=3))
KEY = jax.random.key(7)
MESH = jax.make_mesh((2,), ("i",), (AxisType.Auto,))


@jax.custom_jvp
def with_rule(x):
    return jnp.sin(x) * VECTOR


@with_rule.defjvp
def with_rule_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return with_rule(x), jnp.cos(x) * jax.jit(lambda t: t * VECTOR)(t)


FUNCTIONS = {
    "numpy": lambda x: jnp.sin(x * VECTOR),
    "jax": lambda x: jnp.sin(x @ MATRIX),
    "jitted": lambda x: jax.jit(lambda y: jnp.sin(y @ MATRIX * VECTOR))(x),
    "twice": lambda x: jitted(jnp.sin(jitted(x))) @ MATRIX,
    "nested": lambda x: jax.jit(lambda y: jnp.cos(jitted(y) * VECTOR))(x),
    "key": lambda x: jax.jit(lambda y: jnp.sin(y) * jax.random.normal(KEY, (4,)))(x),
    "rule": with_rule,
}


@jax.jit
def jitted(x):
    return jnp.sin(x @ MATRIX)


WRAPPERS = {
    "call": jax.jit,
    "scan": lambda f: lambda x: lax.scan(lambda y, _: (f(y), y), x, None, length=2)[0],
    "xs": lambda f: lambda x: jnp.sum(lax.map(f, jnp.stack([x, 2 * x])), 0),
    "cond": lambda f: lambda x: lax.cond(jnp.sum(x) > 0, f, lambda y: y * VECTOR, x),
    "fori": lambda f: lambda x: lax.fori_loop(0, 2, lambda i, y: f(y), x),
    "ours": remat.checkpoint,
    "theirs": jax.checkpoint,
    "vmap": lambda f: lambda x: jnp.sum(jax.vmap(f)(jnp.stack([x, x + 1])), 0),
    "shard_map": lambda f: jax.shard_map(f, mesh=MESH, in_specs=P(), out_specs=P()),
}


def gradient(fun):
    return jax.value_and_grad(lambda x: jnp.sum(fun(x)))


def twice_differentiated(fun):
    return lambda x: jax.jvp(gradient(fun), (x,), (jnp.cos(x),))


@cache
def expected(function, wrapper):
    return compiled(twice_differentiated(WRAPPERS[wrapper](FUNCTIONS[function])))(X)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_derivatives(function, wrapper):
    fun = WRAPPERS[wrapper](FUNCTIONS[function])
    checkpointed = remat.checkpoint(fun, policy=policies.dots_saveable)
    actual = compiled(twice_differentiated(checkpointed))(X)
    assert_close(actual, expected(function, wrapper), tolerance=1e-5)


@pytest.mark.parametrize("wrapper", ["scan", "cond", "fori"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_derivatives_of_a_checkpoint_inside(function, wrapper):
    fun = WRAPPERS[wrapper](remat.checkpoint(FUNCTIONS[function]))
    actual = compiled(twice_differentiated(fun))(X)
    assert_close(actual, expected(function, wrapper), tolerance=1e-5)


@pytest.mark.parametrize("wrapper", ["call", "cond", "scan"])
def test_eager(wrapper):
    fun = WRAPPERS[wrapper](FUNCTIONS["nested"])
    actual = gradient(remat.checkpoint(fun))(X)
    assert_close(actual, expected("nested", wrapper)[0], tolerance=1e-5)


NESTED = ["call", "scan", "cond", "ours", "theirs"]


@pytest.mark.parametrize("outer", NESTED)
@pytest.mark.parametrize("inner", NESTED)
def test_nested(outer, inner):
    fun = WRAPPERS[outer](WRAPPERS[inner](FUNCTIONS["nested"]))
    expected = compiled(twice_differentiated(fun))(X)
    actual = compiled(twice_differentiated(remat.checkpoint(fun)))(X)
    assert_close(actual, expected, tolerance=1e-5)


@pytest.mark.parametrize("wrapper", ["call", "scan", "cond"])
def test_a_policy_reaches_into_a_call_that_holds_an_array(wrapper):
    def layer(x):
        return jax.jit(
            lambda y: jnp.sin(checkpoint_name(counted(jnp.sin(y @ MATRIX)), "y"))
        )(x)

    fun = WRAPPERS[wrapper](layer)
    once = 2 if wrapper == "scan" else 1
    save = remat.checkpoint(fun, policy=policies.save_only_these_names("y"))
    assert runs_of(gradient(save), jnp.abs(X)) == once
    assert runs_of(gradient(remat.checkpoint(fun)), jnp.abs(X)) > once


def test_an_array_is_in_the_compiled_code_once():
    large = normal(256, 256)

    def fun(x):
        def product(y):
            return jnp.sin(large @ y)

        return jnp.sum(lax.cond(x[0] > 0, jax.jit(product), lambda y: 2 * y, x))

    def length(fun):
        return len(jax.jit(jax.grad(fun)).lower(normal(256)).as_text())

    # As text, each byte takes two digits.
    assert 2 * large.nbytes < length(remat.checkpoint(fun)) < 3 * large.nbytes
    assert length(remat.checkpoint(fun)) <= length(fun)


def test_in_a_batch():
    def fun(x):
        return lax.cond(x[0] > 0, FUNCTIONS["nested"], with_rule, x)

    def of_rows(fun):
        return gradient(jax.vmap(fun))

    xs = jnp.stack([X, -X, 2 * X])
    actual = compiled(of_rows(remat.checkpoint(fun, policy=policies.dots_saveable)))(xs)
    assert_close(actual, compiled(of_rows(fun))(xs), tolerance=1e-5)
