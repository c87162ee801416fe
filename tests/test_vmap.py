"""Batching, alone and composed with reverse mode in either order."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import (
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

BATCHED = [
    name for name, problem in PROBLEMS.items() if problem.thorough and problem.batched
]
SIZE = 2


def batched_arguments(args):
    """Each argument with a batch axis: the first, none, the last, and so on."""
    axes, batched = [], []
    for i, arg in enumerate(args):
        axis = (0, None, -1)[i % 3]
        axes.append(axis)
        other = directions(arg, seed=1)
        batched.append(arg if axis is None else jnp.stack([arg, other], axis))
    return axes, batched


def vmapped(name, transformation):
    fun, args = pure(name, transformation)
    axes, batched = batched_arguments(args)

    def out_axes(outs):
        return [(0, -1)[i % 2] if jnp.ndim(y) else 0 for i, y in enumerate(outs)]

    def run(batched):
        outs = jax.eval_shape(fun, args)
        batched_fun = jax.vmap(fun, (axes,), out_axes(outs), axis_size=SIZE)
        results = {"vmap": batched_fun(batched)}
        if PROBLEMS[name].reverse:
            results["vjp of vmap"] = jax.vjp(batched_fun, batched)[1](results["vmap"])

            def gradient(args):
                outs, pullback = jax.vjp(fun, args)
                return pullback(directions(outs))

            results["vmap of vjp"] = jax.vmap(gradient, (axes,))(batched)
        return results

    return run, batched


@cache
def expected(name):
    run, args = vmapped(name, unchanged)
    return compiled(run)(args)


@pytest.mark.parametrize(("name", "policy"), some_policies(BATCHED, offset=5, half=0))
def test_vmap(name, policy):
    run, args = vmapped(name, checkpoint_with(policy))
    assert_close(compiled(run)(args), expected(name), PROBLEMS[name].tolerance)


@pytest.mark.parametrize("policy", POLICIES)
def test_vmap_eager(policy):
    run, args = vmapped("mlp", checkpoint_with(policy))
    assert_close(run(args), expected("mlp"), 1e-5)


@pytest.mark.parametrize("out_axes", [0, 1, -1, {"y": 1, "n": 0, "none": None}])
@pytest.mark.parametrize(
    "in_axes", [0, 1, -1, (0, None), (None, 1), ({"w": 0, "b": None}, -1)]
)
def test_axes(in_axes, out_axes):
    def f(params, x):
        y = jnp.tanh(jnp.sin(x) * params["w"] + params["b"])
        return {"y": y, "n": jnp.exp(x), "none": None}

    params = {"w": normal(3, 3, seed=1), "b": normal(3, 3, seed=2)}
    args = params, normal(3, 3)
    actual = jax.vmap(remat.checkpoint(f), in_axes, out_axes)(*args)
    assert_close(actual, jax.vmap(f, in_axes, out_axes)(*args), 1e-5)


@pytest.mark.parametrize("policy", ["none", "everything", "cheap"])
def test_collective_inside(policy):
    def f(w, x):
        y = jnp.sin(x @ w)
        total = jax.lax.psum(jnp.exp(y), "i")
        index = jax.lax.axis_index("i").astype(y.dtype)
        return (
            jnp.sin(total) * jax.lax.pmean(y, "i")
            + jax.lax.all_gather(y, "i")[0] * index
        )

    w, x = normal(3, 3), normal(4, 3)

    def derivatives(f):
        mapped = jax.vmap(f, (None, 0), axis_name="i")

        def gradient(w, x):
            return jax.grad(lambda *args: jnp.sin(f(*args)).sum(), (0, 1))(w, x)

        return jax.jit(lambda w, x: {
            "vmap": mapped(w, x),
            "grad of vmap": jax.grad(lambda w: jnp.sin(mapped(w, x)).sum())(w),
            "vmap of grad": jax.vmap(gradient, (None, 0), axis_name="i")(w, x),
            "hessian": jax.hessian(lambda w: jnp.sin(mapped(w, x)).sum())(w),
        })  # fmt: skip

    actual = derivatives(checkpoint_with(policy)(f))(w, x)
    assert_close(actual, derivatives(f)(w, x), 2e-5)


def test_collective_inside_eager():
    def f(x):
        return jnp.sin(jax.lax.psum(jnp.sin(x), "i")) * x

    def gradient(f):
        return jax.vmap(jax.grad(lambda x: f(x).sum()), axis_name="i")

    x = normal(4, 3)
    assert_close(gradient(remat.checkpoint(f))(x), gradient(f)(x), 1e-5)


def test_axis_of_another_size_is_another_trace():
    f = remat.checkpoint(lambda x: x / jax.lax.psum(jnp.float32(1), "i"))
    for size in (2, 3, 2):
        actual = jax.vmap(f, axis_name="i")(jnp.ones(size))
        np.testing.assert_allclose(actual, np.full(size, 1 / size), rtol=1e-6)


def test_axis_size_alone():
    w = normal(3)
    f = remat.checkpoint(lambda: jnp.sin(w) * jax.lax.axis_index("i").astype(w.dtype))
    actual = jax.vmap(f, axis_size=4, axis_name="i")()
    np.testing.assert_allclose(actual, jnp.sin(w) * jnp.arange(4.0)[:, None], rtol=1e-6)


def test_unbatched_result_stays_unbatched():
    f = remat.checkpoint(lambda x, y: (jnp.sin(x), jnp.cos(y)))
    actual = jax.vmap(f, (0, None), (0, None))(normal(3), normal(2))
    assert_close(actual, (jnp.sin(normal(3)), jnp.cos(normal(2))), 1e-6)


def test_nested_vmap():
    def f(x, y):
        return jnp.sin(jnp.sin(x)[:, None] * y).sum(0)

    x, y = normal(2, 3), normal(4, 5)

    def outer(f):
        by_y = jax.vmap(jax.vmap(f, (None, 0), 1), (0, None))
        return jax.jit(jax.value_and_grad(lambda x: jnp.sin(by_y(x, y)).sum()))

    assert_close(outer(remat.checkpoint(f))(x), outer(f)(x), 1e-5)


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_spmd_axis_name_shards_the_saved_values(prevent_cse):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None))

    def f(x):
        y = jax.lax.with_sharding_constraint(jnp.sin(x), replicated)
        return jnp.sin(y).sum()

    checkpointed = remat.checkpoint(f, prevent_cse=prevent_cse)

    def gradient(f):
        return jax.vmap(jax.grad(f), spmd_axis_name="data")

    x = normal(4, 3)
    lowered = jax.jit(gradient(checkpointed)).lower(x).as_text()
    plain = jax.jit(gradient(f)).lower(x).as_text()

    def constraints(text):
        return {
            line.split("<@mesh, ")[1].split(">")[0]
            for line in text.splitlines()
            if "sharding_constraint" in line
        }

    assert constraints(lowered) == constraints(plain) == {'[{"data"}, {}]'}
    assert_close(jax.jit(gradient(checkpointed))(x), jax.jit(gradient(f))(x), 1e-5)


def test_custom_vmap_inside():
    @jax.custom_batching.custom_vmap
    def rule(x):
        return jnp.sin(x)

    @rule.def_vmap
    def _(axis_size, in_batched, x):
        # Another function, so that a rule that is passed over shows.
        return jnp.cos(x) * jnp.float32(axis_size), in_batched[0]

    x = normal(3, 2)
    f = remat.checkpoint(lambda x: jnp.exp(rule(x)))
    assert_close(jax.vmap(f)(x), jnp.exp(jnp.cos(x) * 3), 1e-5)


def test_batched_keys(key):
    @remat.checkpoint
    def f(key, x):
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.where(keep, jnp.sin(jnp.sin(x)), 0.0).sum()

    keys, x = jax.random.split(key, 4), normal(3)
    actual = jax.jit(jax.vmap(jax.grad(f, 1), (0, None)))(keys, x)
    expected = jax.jit(jax.vmap(jax.grad(f.__wrapped__, 1), (0, None)))(keys, x)
    assert_close(actual, expected, 1e-5)
    assert len({tuple(row) for row in np.asarray(actual).tolist()}) > 1


def test_vmap_keeps_rematerialization():
    f = remat.checkpoint(lambda x: jnp.sin(jnp.sin(x)).sum())
    for transformed in (
        jax.vmap(jax.grad(f)),
        jax.grad(lambda x: jax.vmap(f)(x).sum()),
    ):
        text = str(jax.make_jaxpr(transformed)(normal(2, 3)))
        assert text.count("remat[") == 2
        assert text.count("staged=True") == 1
        assert text.count(" sin ") == 3


def test_vmap_of_nothing_batched_inside():
    """An operand that the derivative alone reads is batched, the primal is not."""

    def f(scale, x):
        return jnp.sin(scale * jnp.sin(x)).sum()

    def tangent(f, x, t):
        return jax.jvp(partial(f, 2.0), (x,), (t,))

    x, t = normal(3), normal(4, 3)
    actual = jax.vmap(partial(tangent, remat.checkpoint(f), x), out_axes=(None, 0))(t)
    expected = jax.vmap(partial(tangent, f, x), out_axes=(None, 0))(t)
    assert_close(actual, expected, 1e-5)
