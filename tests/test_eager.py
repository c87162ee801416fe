"""Calls outside of `jit`: what is compiled, and what is kept in memory."""

import gc
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import monitoring
from problems import assert_close, normal

import remat
from remat import policies

COMPILATION = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations():
    """A list that grows by the duration of each compilation."""
    seen: list[float] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        if event == COMPILATION:
            seen.append(duration_secs)

    monitoring.register_event_duration_secs_listener(listen)
    yield seen
    monitoring.unregister_event_duration_listener(listen)


def network(w, x):
    for _ in range(3):
        x = jnp.tanh(jnp.sin(x @ w))
    return x


def arguments(size):
    return normal(size, size), normal(2, size)


def test_backward_pass_is_compiled_as_one_computation(compilations):
    args = arguments(5)
    y, pullback = jax.vjp(remat.checkpoint(network), *args)
    ct = jax.block_until_ready(jnp.array(y))
    compilations.clear()
    jax.block_until_ready(pullback(ct))
    assert len(compilations) == 1


def test_forward_pass_is_compiled_as_one_computation(compilations):
    args = jax.block_until_ready(arguments(6))
    compilations.clear()
    jax.block_until_ready(jax.vjp(remat.checkpoint(network), *args)[0])
    assert len(compilations) == 1


def test_nothing_is_compiled_again(compilations):
    gradient = jax.grad(lambda w, x: remat.checkpoint(network)(w, x).sum(), (0, 1))
    gradient(*arguments(7))
    args = jax.block_until_ready([2.0 * a for a in arguments(7)])
    compilations.clear()
    jax.block_until_ready(gradient(*args))
    assert compilations == []


def test_equal_policies_share_what_is_compiled(compilations):
    def value(policy):
        f = remat.checkpoint(network, policy=policy)
        return jax.vjp(f, *args)[1](ct)

    args = arguments(8)
    ct = normal(2, 8)
    value(policies.save_any_names_but_these("a", "b"))
    compilations.clear()
    jax.block_until_ready(value(policies.save_any_names_but_these("b", "a")))
    assert compilations == []


def test_eager_and_compiled_agree():
    gradient = jax.grad(lambda w, x: remat.checkpoint(network)(w, x).sum(), (0, 1))
    assert_close(gradient(*arguments(4)), jax.jit(gradient)(*arguments(4)), 1e-5)


def test_disable_jit():
    gradient = jax.grad(lambda w, x: remat.checkpoint(network)(w, x).sum(), (0, 1))
    expected = gradient(*arguments(3))
    with jax.disable_jit():
        assert_close(gradient(*arguments(3)), expected, 1e-5)
        assert_close(remat.checkpoint(jnp.sin)(1.0), jnp.sin(1.0), 1e-6)


@jax.custom_jvp
def root(x):
    return jnp.sqrt(x)


root.defjvps(lambda t, y, x: t / (2.0 * y))

MAKES_NAN = {
    "sqrt": (jnp.sqrt, -1.0),
    "log": (lambda x: jnp.log(jnp.sin(x)), -1.0),
    "within jit": (lambda x: jax.jit(lambda x: jnp.sqrt(x))(x) + 1.0, -1.0),
    "within a checkpoint": (remat.checkpoint(lambda x: jnp.sqrt(x)), -1.0),
    "within a custom_jvp": (root, -1.0),
    "scan": (lambda x: jax.lax.scan(lambda c, _: (jnp.log(c), None), x, None, 2)[0], 0),
}
NAMED = {"log": "log", "scan": "scan"}


@pytest.mark.parametrize("transform", [lambda f: f, jax.grad, jax.value_and_grad])
@pytest.mark.parametrize("case", MAKES_NAN)
def test_debug_nans_names_the_primitive(case, transform, capfd):
    fun, x = MAKES_NAN[case]
    call = transform(remat.checkpoint(lambda x: fun(x)))
    with jax.debug_nans(True):
        assert jnp.all(jnp.isfinite(jnp.array(call(3.0))))
        with pytest.raises(FloatingPointError) as caught:
            call(float(x))
    name = NAMED.get(case, "sqrt")
    message = f"invalid value (nan) encountered in {name}, from {__file__}:"
    assert str(caught.value).startswith(message)
    assert "nan" in capfd.readouterr().out


def test_debug_nans_of_the_gradient_alone():
    f = remat.checkpoint(lambda x: jnp.sqrt(x) * 0.0)
    with jax.debug_nans(True):
        assert f(0.0) == 0.0
        with pytest.raises(FloatingPointError, match="encountered in mul, from"):
            jax.grad(f)(0.0)


def test_debug_infs_names_the_primitive():
    f = remat.checkpoint(lambda x: jnp.log(root(1.0 / x)))
    for call in (f, jax.grad(f), jax.jit(f)):
        with (
            jax.debug_infs(True),
            pytest.raises(
                FloatingPointError, match=r"\(inf\) encountered in div, from"
            ),
        ):
            call(0.0)


def test_debug_nans_without_jit():
    f = remat.checkpoint(lambda x, y: jnp.sqrt(x) + y)
    with jax.debug_nans(True), jax.disable_jit():
        assert f(4.0, 1.0) == 3.0
        with pytest.raises(FloatingPointError, match="encountered in sqrt, from"):
            f(-1.0, 1.0)


def test_debug_nans_looks_at_results_only():
    """As for a function under `jit`: what is masked by the end is no fault."""
    f = remat.checkpoint(lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0))
    with jax.debug_nans(True):
        assert f(-1.0) == 0.0


def live_bytes():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


SIZE, BATCH = 64, 128
WEIGHT_BYTES, ACTIVATION_BYTES = 4 * SIZE * SIZE, 4 * BATCH * SIZE


def deep(w, x):
    for i in range(4):
        x = remat.checkpoint_name(jnp.tanh(jnp.sin(x @ w)), str(i))
    return x


@pytest.mark.parametrize(
    ("policy", "num_saved"),
    [
        (None, 0),
        (policies.save_only_these_names("1"), 1),
        (policies.save_only_these_names("0", "1"), 2),
        (policies.dots_saveable, 4),
    ],
    ids=repr,
)
def test_residuals_live_as_long_as_the_pullback(policy, num_saved):
    f = remat.checkpoint(deep, policy=policy)
    args = jax.block_until_ready((normal(SIZE, SIZE), normal(BATCH, SIZE)))
    ct = jnp.ones((BATCH, SIZE))
    jax.vjp(f, *args)[1](ct)  # compiled code may hold constants
    before = live_bytes()
    y, pullback = jax.vjp(f, *args)
    assert live_bytes() - before == (1 + num_saved) * ACTIVATION_BYTES
    dw, dx = pullback(ct)
    assert (dw.nbytes, dx.nbytes) == (WEIGHT_BYTES, ACTIVATION_BYTES)
    del dw, dx
    assert live_bytes() - before == (1 + num_saved) * ACTIVATION_BYTES
    del pullback
    assert live_bytes() - before == y.nbytes == ACTIVATION_BYTES
    del y
    assert live_bytes() == before


def test_undecorated_function_keeps_more():
    """So that the test above does tell one from the other."""
    args = normal(SIZE, SIZE), normal(BATCH, SIZE)
    before = live_bytes()
    y, pullback = jax.vjp(deep, *args)
    assert live_bytes() - before - y.nbytes >= 4 * ACTIVATION_BYTES
    del pullback


def test_gradient_frees_everything_but_the_gradient():
    gradient = jax.grad(lambda w, x: remat.checkpoint(deep)(w, x).sum())
    args = normal(SIZE, SIZE), normal(BATCH, SIZE)
    gradient(*args)
    before = live_bytes()
    dw = gradient(*args)
    assert live_bytes() - before == dw.nbytes == WEIGHT_BYTES


def test_operands_can_be_donated():
    @partial(jax.jit, donate_argnums=0)
    def step(w, x):
        dw = jax.grad(lambda w: remat.checkpoint(deep)(w, x).sum())(w)
        return w - 0.1 * dw

    w, x = jnp.array(normal(SIZE, SIZE)), normal(BATCH, SIZE)
    expected = w - 0.1 * jax.grad(lambda w: deep(w, x).sum())(w)
    expected = np.asarray(expected)
    updated = step(w, x)
    assert w.is_deleted()
    np.testing.assert_allclose(updated, expected, rtol=1e-3, atol=1e-4)


def test_pullback_reads_the_primal_inputs_again():
    w, x = (jnp.array(a) for a in arguments(5))
    y, pullback = jax.vjp(remat.checkpoint(network), w, x)
    expected = pullback(y)
    assert_close(pullback(y), expected, 1e-6)
    jax.jit(lambda w: 2.0 * w, donate_argnums=0)(w)
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        pullback(y)


def test_copy_of_a_numpy_array_may_be_closed_over_before_it_changes():
    table = np.array(normal(2, 5))
    copy = jnp.array(table)
    f = remat.checkpoint(lambda x: jnp.sin(jnp.sin(x * copy)))
    y, pullback = jax.vjp(f, normal(2, 5))
    expected = pullback(y)
    table *= 2.0
    assert_close(pullback(y), expected, 1e-6)


def test_sharded_arguments_stay_sharded():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("i",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
    w, x = normal(3, 3), normal(4, 3)
    sharded = jax.device_put(x, sharding)
    f = remat.checkpoint(lambda x: jnp.sin(jnp.sin(x @ w)))
    y, pullback = jax.vjp(f, sharded)
    (dx,) = pullback(y)
    assert y.sharding.is_equivalent_to(sharding, 2)
    assert dx.sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_allclose(dx, jax.vjp(f.__wrapped__, x)[1](y)[0], rtol=1e-4)
