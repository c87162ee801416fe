"""The Python function is traced once for each kind of call, and never in vain."""

import gc
import weakref
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import PROBLEMS, checkpoint_with, normal, pure

import remat


class Counter:
    """Counts how often the functions that tell it are traced."""

    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1


@pytest.fixture
def traced():
    return Counter()


def test_gradients_trace_once(traced):
    @remat.checkpoint
    def f(w, x):
        traced()
        return jnp.sin(jnp.sin(x @ w)).sum()

    for i in range(20):
        jax.grad(f)(normal(3, 3, seed=i), normal(2, 3, seed=i))
    assert traced.count == 1


def test_function_wrapped_anew_is_traced_once(traced):
    def f(x):
        traced()
        return jnp.sin(jnp.sin(x)).sum()

    for i in range(20):
        jax.grad(remat.checkpoint(f))(normal(3, seed=i))
    for policy in (remat.policies.everything_saveable, remat.policies.dots_saveable):
        jax.grad(remat.checkpoint(f, policy=policy))(normal(3))
    assert traced.count == 1


def test_every_transformation_uses_one_trace(traced):
    @remat.checkpoint
    def f(x):
        traced()
        return jnp.sin(jnp.sin(x)).sum()

    x = normal(3)
    f(x)
    jax.jit(f)(x)
    jax.jit(jax.grad(f))(x)
    jax.jvp(f, (x,), (x,))
    jax.linearize(f, x)
    jax.vmap(f)(normal(2, 3))
    jax.vmap(jax.grad(f), axis_name="i")(normal(2, 3))
    jax.jit(lambda x: jax.lax.scan(lambda c, _: (f(c) + x, None), x, None, 3))(x)
    # Under an axis name a function may mean something else.
    assert traced.count <= 2


def test_one_trace_in_a_loop_of_layers(traced):
    def layer(w, x):
        traced()
        return jnp.sin(x @ w)

    def loss(ws, x):
        for w in ws:
            x = remat.checkpoint(layer)(w, x)
        return x.sum()

    ws = [normal(3, 3, seed=i) for i in range(6)]
    jax.jit(jax.grad(loss))(ws, normal(2, 3))
    assert traced.count == 1


@pytest.mark.parametrize(
    "other",
    [
        (normal(4), 1.0),
        (normal(3, dtype=jnp.bfloat16), 1.0),
        (normal(3), jnp.float32(1.0)),
        (normal(3), 1),
        (np.arange(3), 1.0),
        ((normal(3),), 1.0),
        ([normal(3)], 1.0),
    ],
    ids=["shape", "dtype", "weak_type", "int", "numpy", "tuple", "list"],
)
def test_another_kind_of_argument_is_another_trace(traced, other):
    @remat.checkpoint
    def f(x, scale):
        traced()
        return jax.tree.map(lambda x: jnp.sin(x.astype(jnp.float32)) * scale, x)

    for _ in range(2):
        f(normal(3), 1.0)
        f(*other)
    assert traced.count == 2


def test_numpy_and_jax_arrays_are_of_one_kind(traced):
    @remat.checkpoint
    def f(x):
        traced()
        return jnp.sin(x)

    f(normal(3))
    f(np.asarray(normal(3)))
    assert traced.count == 1


def test_keyword_structure_is_part_of_the_kind(traced):
    @remat.checkpoint
    def f(x, y=None, **others):
        traced()
        return jnp.sin(x) if y is None else x * y + sum(others.values())

    x = normal(3)
    calls = [((x,), {}), ((x, x), {}), ((x,), {"y": x}), ((x,), {"y": x, "z": x})]
    for _ in range(2):
        for args, kwargs in calls:
            f(*args, **kwargs)
    assert traced.count == len(calls)


def test_order_of_keywords_does_not_matter(traced):
    @remat.checkpoint
    def f(*, a, b):
        traced()
        return a - b

    assert f(a=1.0, b=2.0) == f(b=2.0, a=1.0) == -1.0
    assert traced.count == 1


def test_each_static_value_is_traced_once(traced):
    @partial(remat.checkpoint, static_argnums=1)
    def f(x, power):
        traced()
        return (jnp.sin(x) ** power).sum()

    def plain(x, power):
        return (jnp.sin(x) ** power).sum()

    for power in (2, 3, 2, 3):
        actual = jax.grad(f)(normal(3), power)
        np.testing.assert_allclose(actual, jax.grad(plain)(normal(3), power), rtol=1e-4)
    assert traced.count == 2


# Closures.


def test_closed_over_tracers_give_right_gradients():
    def loss(w, v, x):
        def block(x):
            return jnp.sin(jnp.sin(x @ w) * v)

        checkpointed = remat.checkpoint(block)
        return checkpointed(checkpointed(x)).sum()

    def plain(w, v, x):
        def block(x):
            return jnp.sin(jnp.sin(x @ w) * v)

        return block(block(x)).sum()

    args = normal(3, 3), normal(3), normal(2, 3)
    for transform in (lambda f: f, jax.jit):
        actual = transform(jax.grad(loss, (0, 1, 2)))(*args)
        for a, e in zip(actual, jax.grad(plain, (0, 1, 2))(*args), strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)


def test_closed_over_tracer_of_an_outer_gradient():
    def outer(f):
        def of_y(y):
            checkpointed = f(lambda x: jnp.sin(x * y) * jnp.exp(y))
            return jax.grad(lambda x: jnp.sin(checkpointed(x)))(y * 2.0)

        return jax.grad(of_y)

    actual, expected = outer(remat.checkpoint)(0.5), outer(lambda f: f)(0.5)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_closed_over_tracers_of_two_levels():
    def f(transform, x):
        def of_y(y):
            def of_z(z):
                return transform(lambda w: jnp.sin(w * x) * jnp.cos(y * z) * z)(z)

            return jax.grad(of_z)(y) * x

        return jax.grad(of_y)(x)

    actual = jax.grad(partial(f, remat.checkpoint))(0.5)
    expected = jax.grad(partial(f, lambda f: f))(0.5)
    np.testing.assert_allclose(actual, expected, rtol=1e-4)


def test_function_that_outlives_the_tracer_it_saw():
    weights = {"w": jnp.ones(())}

    @remat.checkpoint
    def f(x):
        return jnp.sin(x * weights["w"])

    def with_weight(w):
        weights["w"] = w
        return f(2.0)

    np.testing.assert_allclose(jax.grad(with_weight)(3.0), 2 * np.cos(6.0), rtol=1e-5)
    np.testing.assert_allclose(jax.jit(with_weight)(4.0), np.sin(8.0), rtol=1e-5)
    weights["w"] = jnp.float32(5.0)
    np.testing.assert_allclose(f(2.0), np.sin(10.0), rtol=1e-5)


def test_closed_over_batched_value():
    x = normal(4)

    def row(transform, x):
        return transform(lambda y: jnp.sin(x * y))(2.0)

    actual = jax.vmap(partial(row, remat.checkpoint))(x)
    np.testing.assert_allclose(actual, jnp.sin(2 * x), rtol=1e-5)


def test_variable_bound_anew_is_seen():
    scale = 2.0

    @remat.checkpoint
    def f(x):
        return jnp.sin(x * scale)

    np.testing.assert_allclose(f(1.0), np.sin(2.0), rtol=1e-6)
    scale = 3.0
    np.testing.assert_allclose(f(1.0), np.sin(3.0), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(f)(1.0), 3 * np.cos(3.0), rtol=1e-5)
    scale = jnp.float32(2.0)
    np.testing.assert_allclose(f(1.0), np.sin(2.0), rtol=1e-6)


class Model:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x):
        return jnp.sin(x * self.scale)

    def method(self, x):
        return jnp.sin(x * self.scale)


@pytest.mark.parametrize(
    "of", [lambda m: m.method, lambda m: m], ids=["method", "call"]
)
def test_changed_attribute_is_seen(of):
    model = Model(2.0)
    f = remat.checkpoint(of(model))
    np.testing.assert_allclose(f(1.0), np.sin(2.0), rtol=1e-6)
    model.scale = 3.0
    np.testing.assert_allclose(f(1.0), np.sin(3.0), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(f)(1.0), 3 * np.cos(3.0), rtol=1e-5)
    np.testing.assert_allclose(
        jax.grad(lambda s: remat.checkpoint(of(Model(s)))(1.0))(2.0),
        np.cos(2.0),
        rtol=1e-5,
    )


global_scale = 0.0


def reads_default(scale):
    def f(x, scale=scale):
        return jnp.sin(x * scale)

    def change(scale):
        f.__defaults__ = (scale,)

    return f, change


def reads_global(scale):
    def change(scale):
        global global_scale
        global_scale = scale

    change(scale)
    return lambda x: jnp.sin(x * global_scale), change


def reads_dict(scale):
    settings = {"scale": scale}
    return lambda x: jnp.sin(x * settings["scale"]), partial(
        settings.__setitem__, "scale"
    )


def reads_list(scale):
    scales = [scale]
    return lambda x: jnp.sin(x * scales[0]), partial(scales.__setitem__, 0)


def reads_attribute(scale):
    model = Model(scale)
    return lambda x: jnp.sin(x * model.scale), partial(setattr, model, "scale")


READERS = [reads_default, reads_global, reads_dict, reads_list, reads_attribute]


@pytest.mark.parametrize("make", READERS)
def test_what_a_function_reads_is_seen_when_it_changes(make):
    f, change = make(2.0)
    np.testing.assert_allclose(remat.checkpoint(f)(1.0), np.sin(2.0), rtol=1e-6)
    change(3.0)
    np.testing.assert_allclose(remat.checkpoint(f)(1.0), np.sin(3.0), rtol=1e-6)


@pytest.mark.parametrize("make", READERS)
def test_what_a_function_reads_is_differentiated_though_it_was_a_number(make):
    f, change = make(2.0)
    np.testing.assert_allclose(remat.checkpoint(f)(1.0), np.sin(2.0), rtol=1e-6)

    def of_scale(scale):
        change(scale)
        return remat.checkpoint(f)(1.0)

    np.testing.assert_allclose(jax.grad(of_scale)(3.0), np.cos(3.0), rtol=1e-5)
    change(4.0)
    np.testing.assert_allclose(remat.checkpoint(f)(1.0), np.sin(4.0), rtol=1e-5)


def test_closed_over_numpy_array_changed_in_place_is_seen():
    table = np.ones(3, np.float32)
    f = remat.checkpoint(lambda x: jnp.sin(x * table))
    x = normal(3)
    np.testing.assert_allclose(f(x), jnp.sin(x), rtol=1e-6)
    table[:] = 2.0
    np.testing.assert_allclose(f(x), jnp.sin(2 * x), rtol=1e-6)


def test_partial_callable_and_lambda():
    def f(scale, x, *, shift):
        return jnp.sin(x * scale + shift)

    bound = partial(f, 2.0, shift=0.5)
    expected = 2 * np.cos(2.5)
    for fun in (bound, jax.tree_util.Partial(f, 2.0, shift=0.5), lambda x: bound(x)):
        actual = jax.grad(remat.checkpoint(fun))(1.0)
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
    # Arguments of another partial of the same function are other ones.
    other = remat.checkpoint(partial(f, 3.0, shift=0.5))
    np.testing.assert_allclose(other(1.0), np.sin(3.5), rtol=1e-5)


@dataclass(frozen=True)
class Frozen:
    scale: float

    def __call__(self, x):
        return jnp.sin(x * self.scale)


def test_frozen_callables():
    for scale in (2.0, 3.0):
        f = remat.checkpoint(Frozen(scale))
        np.testing.assert_allclose(f(1.0), np.sin(scale), rtol=1e-6)


def test_jitted_and_builtin_functions():
    for fun in (jnp.sin, jax.jit(jnp.sin), jax.nn.relu, jax.lax.exp):
        np.testing.assert_allclose(remat.checkpoint(fun)(1.0), fun(1.0), rtol=1e-6)
        assert jnp.isfinite(jax.grad(remat.checkpoint(fun))(1.0))


def test_recursive_function():
    @partial(remat.checkpoint, static_argnums=1)
    def power(x, n):
        return jnp.sin(x) if n == 0 else x * power(x, n - 1)

    expected = 3 * np.sin(2.0) * 4 + 8 * np.cos(2.0)
    np.testing.assert_allclose(jax.grad(power)(2.0, 3), expected, rtol=1e-5)


def test_error_in_the_function_is_the_users_own():
    @remat.checkpoint
    def f(x):
        raise KeyError("mine")

    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            f(1.0)


# Leaks.


@pytest.mark.parametrize(
    "name", ["mlp", "closed_over_tracers", "custom_vjp", "scan", "nested_checkpoint"]
)
def test_no_tracer_leaks(name):
    with jax.checking_leaks():
        fun, args = pure(name, checkpoint_with("names_or_dots"))

        def run(args):
            outs, pullback = jax.vjp(fun, args)
            return pullback(outs)

        assert len(jax.jit(run)(args)[0]) == len(args)
        assert len(run(args)[0]) == len(args)


def test_closed_over_arrays_are_freed_with_the_function():
    class Owner:
        pass

    def make():
        owner = Owner()
        big = normal(64, 64)

        def f(x):
            assert owner
            return jnp.sin(x @ big)

        checkpointed = remat.checkpoint(f)
        checkpointed(normal(2, 64))
        jax.grad(lambda x: checkpointed(x).sum())(normal(2, 64))
        assert live() == before + 1
        # Compiled code may hold a copy of its own of what it closes over.
        jax.jit(jax.grad(lambda x: checkpointed(x).sum()))(normal(2, 64))
        return checkpointed, weakref.ref(owner)

    def live():
        gc.collect()
        return sum(a.shape == (64, 64) for a in jax.live_arrays())

    before = live()
    function, owner = make()
    assert owner() is not None
    del function
    assert live() == before
    assert owner() is None


def test_functions_made_anew_do_not_pile_up():
    """As in a training step that is not compiled and defines its loss inside."""
    x = normal(64, 64)

    def step(i):
        shift = x + i

        def loss(x):
            return jnp.sin(jnp.sin(x) * shift).sum()

        return jax.grad(remat.checkpoint(loss))(x)

    step(0.0)
    gc.collect()
    before = len(jax.live_arrays())
    for i in range(5):
        step(float(i))
    gc.collect()
    assert len(jax.live_arrays()) <= before


@pytest.mark.parametrize("name", list(PROBLEMS)[:3])
def test_arguments_are_not_kept(name):
    fun, args = pure(name, remat.checkpoint)
    fresh = [jnp.array(a) for a in args]
    jax.vjp(fun, fresh)[1](fun(fresh))
    references = [weakref.ref(a) for a in fresh]
    del fresh
    gc.collect()
    assert all(reference() is None for reference in references)
