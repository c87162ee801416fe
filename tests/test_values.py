"""A checkpointed function gives what the undecorated function gives."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import (
    PROBLEMS,
    assert_close,
    checkpoint_with,
    compiled,
    normal,
    some_policies,
    unchanged,
)

import remat


@cache
def expected(name):
    fun, args = PROBLEMS[name].make(unchanged)
    return compiled(fun)(*args)


def as_arrays(tree):
    return jax.tree.map(jnp.asarray, tree)


@pytest.mark.parametrize(("name", "policy"), some_policies(offset=1))
def test_values(name, policy):
    fun, args = PROBLEMS[name].make(checkpoint_with(policy))
    outs = compiled(fun)(*args)
    assert_close(outs, expected(name), PROBLEMS[name].tolerance)


@pytest.mark.parametrize(("name", "policy"), some_policies(offset=5))
def test_values_eager(name, policy):
    fun, args = PROBLEMS[name].make(checkpoint_with(policy))
    outs = as_arrays(fun(*args))
    assert_close(outs, expected(name), PROBLEMS[name].tolerance)


@pytest.mark.parametrize("result", [None, (), {}, [(), {"a": None}]])
def test_results_without_arrays(result):
    f = remat.checkpoint(lambda x: result)
    assert f(normal(3)) == result
    assert jax.jit(f)(normal(3)) == result
    primals, tangents = jax.jvp(f, (normal(3),), (normal(3),))
    assert primals == tangents == result
    assert jax.vmap(f)(normal(3)) == result


@pytest.mark.parametrize("decorate", [
    lambda f: remat.checkpoint(f),
    lambda f: remat.checkpoint()(f),
    lambda f: remat.checkpoint(policy=None)(f),
    lambda f: remat.remat(f, prevent_cse=False),
    lambda f: partial(remat.checkpoint, policy=remat.policies.dots_saveable)(f),
])  # fmt: skip
def test_forms_of_the_decorator(decorate):
    def f(x):
        """Doc."""
        return jnp.sin(x)

    decorated = decorate(f)
    assert decorated.__name__ == "f"
    assert decorated.__doc__ == "Doc."
    assert decorated.__wrapped__ is f
    np.testing.assert_allclose(decorated(1.0), np.sin(1.0), rtol=1e-6)


def test_method():
    class Model:
        def __init__(self, w):
            self.w = w

        @remat.checkpoint
        def decorated(self, x):
            return jnp.sin(x @ self.w)

        def plain(self, x):
            return jnp.sin(x @ self.w)

    jax.tree_util.register_pytree_node(
        Model, lambda m: ((m.w,), None), lambda _, children: Model(*children)
    )
    model, x = Model(normal(3, 3)), normal(2, 3)
    expected = jnp.sin(x @ model.w)
    np.testing.assert_allclose(model.decorated(x), expected, rtol=1e-5)
    np.testing.assert_allclose(remat.checkpoint(model.plain)(x), expected, rtol=1e-5)


def test_weak_types_are_kept():
    @remat.checkpoint
    def f(scale, x):
        return scale * 2, x + 1, jnp.int32(2)

    scale, shifted, count = f(0.5, normal(3))
    plain = jax.jit(f.__wrapped__)(0.5, normal(3))
    for actual, expected in zip((scale, shifted, count), plain, strict=True):
        assert jax.typeof(actual) == jax.typeof(expected)
    assert jax.typeof(scale).weak_type
    # A value of weak type adapts to what it is multiplied with.
    assert (scale * jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "argument",
    [np.arange(3.0, dtype=np.float32), np.float32(2.0), 2.0, 2, True, 1j],
    ids=lambda argument: f"{type(argument).__name__}",
)
def test_arguments_that_are_not_jax_arrays(argument):
    def f(x):
        return x * x

    actual, expected = remat.checkpoint(f)(argument), jax.jit(f)(argument)
    assert_close(actual, expected, 1e-6)


def test_default_device_and_precision_are_those_of_the_call():
    f = remat.checkpoint(lambda x: x @ x)
    x = normal(3, 3)
    with jax.default_device(jax.devices()[1]):
        assert f(np.asarray(x)).devices() == {jax.devices()[1]}
    with jax.default_matmul_precision("highest"):
        text = str(jax.make_jaxpr(f)(x))
    assert "HIGHEST" in text
    assert "HIGHEST" not in str(jax.make_jaxpr(f)(x))


def test_x64_is_that_of_the_call():
    f = remat.checkpoint(lambda x: jnp.sin(x) + jnp.zeros(3, float))
    assert f(normal(3)).dtype == jnp.float32
    with jax.enable_x64(True):
        x = jnp.arange(3.0)
        assert x.dtype == f(x).dtype == jnp.float64
        assert jax.grad(lambda x: f(x).sum())(x).dtype == jnp.float64


def test_named_pytree():
    tree = {"w": normal(2), "n": [jnp.int32(3), 2.0], "none": None}
    named = remat.checkpoint_name(tree, "tree")
    assert jax.tree.structure(named) == jax.tree.structure(tree)
    assert_close(as_arrays(named), as_arrays(tree), 0.0)


def test_compiled_call_keeps_its_name_in_the_program():
    @remat.checkpoint
    def f(x):
        with jax.named_scope("inner_scope"):
            return jnp.sin(x)

    text = jax.jit(f).lower(normal(3)).as_text(debug_info=True)
    assert "remat/inner_scope" in text


def test_debug_print_happens_once(capfd):
    @remat.checkpoint
    def f(x):
        y = jnp.sin(x)
        jax.debug.print("seen {}", y)
        return jnp.exp(y)

    for gradient in (jax.grad(f), jax.jit(jax.grad(f))):
        gradient(1.0)
        jax.effects_barrier()
        assert capfd.readouterr().out.count("seen") == 1
