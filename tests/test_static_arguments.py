"""Arguments that are Python values, however they are declared and passed."""

import enum
from dataclasses import dataclass
from functools import partial, wraps

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remat import checkpoint, policies

X = jnp.array([0.5, 1.0, 1.5])


def value_and_grad(f, *args, **kwargs):
    """The value of `f` and its gradient in the first argument."""
    return jax.value_and_grad(lambda x: jnp.sum(f(x, *args, **kwargs)))(X)


def check(rematerialized, plain, *args, compiled=False, **kwargs):
    """Compare the two on the dynamic X and on static arguments."""
    run = jax.jit if compiled else lambda f: f
    got = run(lambda: value_and_grad(rematerialized, *args, **kwargs))()
    expected = value_and_grad(plain, *args, **kwargs)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def repeated(x, count, mode="sin", scale=1.0):
    """Fails unless `count` and `mode` are Python values; `scale` may be either."""
    for _ in range(count):
        x = {"sin": jnp.sin, "tanh": jnp.tanh}[mode](x)
    return x * scale


CALLS = {
    "position": ((2, "tanh"), {}),
    "name": ((2,), {"mode": "tanh"}),
    "both names": ((), {"mode": "tanh", "count": 2}),
    "default": ((2,), {}),
    "with a dynamic one": ((2, "tanh", 3.0), {}),
    "with a dynamic one by name": ((2,), {"mode": "tanh", "scale": 3.0}),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    "static",
    [
        {"static_argnums": (1, 2)},
        {"static_argnums": [2, 1]},
        {"static_argnums": range(1, 3)},
        {"static_argnums": (-3, -2)},
        {"static_argnums": (1, -2)},
        {"static_argnames": ("count", "mode")},
        {"static_argnames": ["mode", "count"]},
        {"static_argnames": dict.fromkeys(["mode", "count"])},
        {"static_argnums": 1, "static_argnames": "mode"},
        {"static_argnums": (1, 2), "static_argnames": ("count", "mode")},
    ],
    ids=str,
)
@pytest.mark.parametrize("call", CALLS)
def test_however_declared_and_passed(static, call, compiled):
    args, kwargs = CALLS[call]
    rematerialized = checkpoint(repeated, **static)
    check(rematerialized, repeated, *args, compiled=compiled, **kwargs)


def test_dynamic_argument_after_static_ones_is_differentiated():
    f = checkpoint(repeated, static_argnums=(1, 2))

    def loss(f, x, scale):
        return jnp.sum(f(x, 2, "tanh", scale))

    got = jax.grad(partial(loss, f), argnums=(0, 1))(X, 3.0)
    expected = jax.grad(partial(loss, repeated), argnums=(0, 1))(X, 3.0)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_static_argument_before_the_dynamic_one():
    f = checkpoint(lambda count, x: repeated(x, count), static_argnums=0)
    check(lambda x: f(2, x), lambda x: repeated(x, 2))
    check(lambda x: f(x=x, count=2), lambda x: repeated(x, 2))


def test_every_argument_static():
    f = checkpoint(lambda n, fill: jnp.full(n, fill), static_argnums=(0, 1))
    np.testing.assert_array_equal(f(2, 3.0), jnp.full(2, 3.0))


@pytest.mark.parametrize("argnums", [2, -1])
def test_numpy_integers_are_positions(argnums):
    f = checkpoint(lambda x, y, n: x * y if n else x, static_argnums=np.int64(argnums))  # pyright: ignore[reportArgumentType]
    np.testing.assert_array_equal(f(X, 2.0, False), X)
    np.testing.assert_array_equal(f(X, 2.0, True), 2 * X)


def variadic(x, *rest, mode="sin", **options):
    for count, scale in zip(rest[::2], rest[1::2], strict=True):
        x = repeated(x, count, mode) * scale
    return -x if options.get("negative") else x


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    "static",
    [
        {"static_argnums": (1, 3), "static_argnames": ("mode", "negative")},
        {"static_argnums": (-2, -4), "static_argnames": ["negative", "mode"]},
    ],
    ids=str,
)
def test_any_number_of_arguments(static, compiled):
    check(
        checkpoint(variadic, **static),
        variadic,
        2,
        3.0,
        1,
        0.5,
        compiled=compiled,
        mode="tanh",
        negative=True,
    )


def test_negative_position_counts_from_the_last_of_any_number():
    f = checkpoint(lambda x, *rest: x if rest[-1] else -x, static_argnums=-1)
    np.testing.assert_array_equal(f(X, False), -X)
    np.testing.assert_array_equal(f(X, 1.0, 2.0, True), X)


def test_keyword_only():
    def keyword(x, *, count, mode="sin"):
        return repeated(x, count, mode)

    f = checkpoint(keyword, static_argnames=("count", "mode"))
    check(f, keyword, count=2)
    check(f, keyword, count=1, mode="tanh")


def test_positional_only():
    def positional(x, n, /, **options):
        return x * options["n"] if n else x

    # The n of the options is another one, and an ordinary argument.
    check(checkpoint(positional, static_argnums=1), positional, True, n=2.0)


def test_name_among_any_names():
    def named(x, **options):
        return x * 2 if options["flag"] else x * options["scale"]

    f = checkpoint(named, static_argnames="flag")
    check(f, named, flag=False, scale=3.0)
    check(f, named, flag=True, scale=3.0)


@pytest.mark.parametrize(
    ("wrapped", "static", "args", "kwargs"),
    [
        (partial(repeated, mode="tanh"), {"static_argnums": 1}, (2,), {}),
        (
            partial(repeated, mode="tanh"),
            {"static_argnames": ("count", "mode")},
            (2,),
            {"mode": "sin"},
        ),
        (partial(repeated, count=2), {"static_argnames": "mode"}, (), {"mode": "tanh"}),
        (
            partial(lambda count, x, mode: repeated(x, count, mode), 2),
            {"static_argnums": 1},
            ("tanh",),
            {},
        ),
        (partial(repeated, count=2, mode="tanh"), {}, (), {}),
    ],
)
def test_partial(wrapped, static, args, kwargs):
    check(checkpoint(wrapped, **static), wrapped, *args, **kwargs)


def test_wrapper_that_tells_its_signature():
    @wraps(repeated)
    def wrapper(*args, **kwargs):
        return repeated(*args, **kwargs)

    f = checkpoint(wrapper, static_argnames=("count", "mode"))
    check(f, repeated, 2, "tanh")
    check(f, repeated, count=2, mode="tanh")


class Model:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x, count):
        return repeated(x, count) * self.scale

    def apply(self, x, count):
        return repeated(x, count) * self.scale

    @partial(checkpoint, static_argnums=(0, 2))
    def decorated(self, x, count):
        return self.apply(x, count)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_methods_and_callable_objects(compiled):
    model = Model(3.0)
    for f in (
        checkpoint(model.apply, static_argnums=1),
        checkpoint(model.apply, static_argnames="count"),
        checkpoint(model, static_argnums=1),
        checkpoint(model, static_argnums=-1),
        model.decorated,
    ):
        check(f, model.apply, 2, compiled=compiled)
        check(f, model.apply, count=2, compiled=compiled)


def test_object_that_changed_is_traced_again():
    model = Model(3.0)
    f = checkpoint(model.apply, static_argnums=1)
    np.testing.assert_allclose(f(X, 0), 3 * X)
    model.scale = 5.0
    np.testing.assert_allclose(f(X, 0), 5 * X)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass(frozen=True)
class Config:
    depth: int
    name: str = "a"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Color.RED, Color.BLUE),
        (Config(1), Config(2)),
        (None, 0),
        ("sin", "tanh"),
        ((1, "a"), (1, "b")),
        (jnp.sin, jnp.cos),
        (jnp.float32, jnp.bfloat16),
        (frozenset({1}), frozenset({2})),
    ],
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_any_hashable_value(one, other, compiled):
    f = checkpoint(lambda x, n: x if n == one else -x, static_argnums=1)
    run = jax.jit(f, static_argnums=1) if compiled else f
    for value, expected in [(one, X), (other, -X), (one, X)]:
        np.testing.assert_array_equal(run(X, value), expected)


FACTORS = {bool: 2.0, int: 3.0, float: 5.0}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("nested", [False, True])
def test_equal_values_of_different_types_are_different(nested, compiled):
    def by_type(x, n):
        return x * FACTORS[type(n[0] if nested else n)]

    f = checkpoint(by_type, static_argnums=1)
    for value in (True, 1, 1.0, 1, True):
        static = (value, "a") if nested else value
        call = partial(f, n=static)
        got = jax.jit(call)(X) if compiled else call(X)
        np.testing.assert_array_equal(got, FACTORS[type(value)] * X)


def test_traced_once_for_each_static_value():
    traced = []

    def counted(x, n):
        traced.append(n)
        return x * n

    f = checkpoint(counted, static_argnums=1)
    for _ in range(3):
        for n in (2, 3):
            np.testing.assert_array_equal(f(X, n), n * X)
            np.testing.assert_array_equal(f(X, n=n), n * X)
            jax.grad(lambda x, n=n: jnp.sum(f(x, n)))(X)
    assert sorted(set(traced)) == [2, 3]
    # Passed by name it may be traced once more.
    assert len(traced) <= 4


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_with_a_policy_and_vmap(compiled):
    f = checkpoint(
        repeated,
        policy=policies.everything_saveable,
        static_argnames=("count", "mode"),
    )
    batched = jax.vmap(lambda x: jax.grad(lambda x: jnp.sum(f(x, 2, mode="tanh")))(x))
    run = jax.jit(batched) if compiled else batched
    plain = jax.vmap(jax.grad(lambda x: jnp.sum(repeated(x, 2, "tanh"))))
    xs = jnp.stack([X, 2 * X])
    np.testing.assert_allclose(run(xs), plain(xs), rtol=1e-6)


@pytest.mark.parametrize(
    ("flags", "barriers"),
    [
        (True, True),
        (False, False),
        # As in JAX, static arguments have no entry.
        ((True, False), True),
        ((False, False), False),
    ],
    ids=str,
)
def test_prevent_cse_prefix_with_static_arguments(flags, barriers):
    def f(x, count, scale):
        return jnp.sum(repeated(x, count) * scale)

    g = checkpoint(f, static_argnums=1, prevent_cse=flags)
    differentiated = jax.jit(jax.grad(lambda x, scale: g(x, 2, scale)))
    text = differentiated.lower(X, 3.0).as_text()
    assert ("optimization_barrier" in text) == barriers
    expected = jax.grad(lambda x: f(x, 2, 3.0))(X)
    np.testing.assert_allclose(differentiated(X, 3.0), expected, rtol=1e-6)
