"""Prints and other effects: once in the forward pass, never in the recomputation.

What is recorded is compared with a call of the undecorated function without any
derivative. Where a loop is differentiated JAX itself moves what depends on no iteration
out of it, so that the undecorated function may then print less often.
"""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counted, equations, runs_of
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType, PartitionSpec
from problems import assert_close, compiled, normal

import remat
from remat import checkpoint_name, policies

X = jnp.array([0.5, 0.25])
XS = jnp.stack([X, 2.0 * X])

POLICIES = {
    "none": None,
    "named": policies.save_any_names_but_these("none"),
    "everything": policies.everything_saveable,
}
recorded: list[tuple] = []


def record(*values: jax.Array, ordered: bool) -> None:
    """Record the values on the host, by a debug callback."""
    jax.debug.callback(_append, *values, ordered=ordered)


def _append(*values):
    recorded.append(tuple(np.round(np.asarray(v), 4).tolist() for v in values))


def records_of(fun, *args):
    """What is recorded while `fun` runs, and its results."""
    recorded.clear()
    results = jax.block_until_ready(fun(*args))
    jax.effects_barrier()
    return list(recorded), results


def assert_records(actual, expected, ordered):
    if ordered:
        assert actual == expected
    else:
        assert Counter(map(str, actual)) == Counter(map(str, expected))


# Functions that record at all places. They get what makes a checkpoint of a function,
# or the identity, and whether to record in order.


def plain(checkpoint, ordered):
    @checkpoint
    def fun(x):
        y = checkpoint_name(jnp.sin(x), "y")
        record(y, ordered=ordered)
        record(ordered=ordered)
        z = jnp.tanh(y)
        record(z, ordered=ordered)
        return jnp.sum(jnp.cos(z) * y)

    return fun


def scan_body(checkpoint, ordered):
    @checkpoint
    def fun(x):
        def step(carry, i):
            y = checkpoint_name(jnp.sin(carry) * x, "y")
            record(i, y, ordered=ordered)
            record(ordered=ordered)
            record(x, ordered=ordered)
            return jnp.tanh(y), y

        carry, ys = lax.scan(step, x, jnp.arange(3.0))
        return jnp.sum(carry * ys)

    return fun


def fori_loop_body(checkpoint, ordered):
    @checkpoint
    def fun(x):
        def body(i, carry):
            record(i, carry, ordered=ordered)
            return jnp.sin(carry)

        return jnp.sum(lax.fori_loop(0, 3, body, x) ** 2)

    return fun


def branch(checkpoint, ordered):
    @checkpoint
    def fun(x):
        def taken(x):
            y = checkpoint_name(jnp.sin(x), "y")
            record(y, ordered=ordered)
            return jnp.sin(y)

        def other(x):
            record(x + 10.0, ordered=ordered)
            return jnp.cos(x)

        y = lax.cond(x.sum() > 0, taken, other, jnp.exp(x))
        return jnp.sum(jnp.tanh(y))

    return fun


def nested(checkpoint, ordered):
    @checkpoint
    def inner(x):
        y = jnp.sin(x)
        record(y, ordered=ordered)
        return checkpoint_name(jnp.cos(y), "y")

    @checkpoint
    def fun(x):
        y = inner(jnp.exp(x))
        record(y, ordered=ordered)
        return jnp.sum(jnp.tanh(inner(y)))

    return fun


def checkpointed_scan_body(checkpoint, ordered):
    def fun(x):
        @checkpoint
        def step(carry, i):
            record(i, carry, ordered=ordered)
            return jnp.sin(carry)

        carry, _ = lax.scan(lambda c, i: (step(c, i), None), x, jnp.arange(3.0))
        return jnp.sum(carry)

    return fun


def function_with_rules(checkpoint, ordered):
    """It and its forward rule record the same, so that each call records once."""

    @jax.custom_vjp
    def sine(x):
        record(jnp.cos(x), ordered=ordered)
        return jnp.sin(x)

    def forward(x):
        residual = checkpoint_name(jnp.cos(x), "y")
        record(residual, ordered=ordered)
        return jnp.sin(x), residual

    sine.defvjp(forward, lambda residual, ct: (residual * ct,))
    return checkpoint(lambda x: jnp.sum(jnp.tanh(sine(jnp.exp(x)))))


def inner_jit(checkpoint, ordered):
    @jax.jit
    def inner(x):
        record(x, ordered=ordered)
        return jnp.sin(x)

    return checkpoint(lambda x: jnp.sum(inner(inner(x))))


def while_loop(checkpoint, ordered):
    @checkpoint
    def fun(x):
        def body(carry):
            i, y = carry
            record(i, y, ordered=ordered)
            return i + 1, jnp.sin(y)

        start = (jnp.int32(0), lax.stop_gradient(x))
        _, y = lax.while_loop(lambda carry: carry[0] < 3, body, start)
        return jnp.sum(jnp.sin(x * y))

    return fun


FUNCTIONS = [
    plain,
    scan_body,
    fori_loop_body,
    branch,
    nested,
    checkpointed_scan_body,
    function_with_rules,
    inner_jit,
    while_loop,
]


def with_policy(policy):
    return partial(remat.checkpoint, policy=POLICIES[policy])


def unchanged(fun):
    return fun


def cases(functions, repeats):
    """Every function a number of times, the policies and orders taken in turn."""
    names = list(POLICIES)
    return [
        pytest.param(
            make,
            (policy := names[(i + j) % 3]),
            (ordered := (i + j) % 2 == 1),
            id=f"{make.__name__}-{policy}{'-ordered' * ordered}",
        )
        for i, make in enumerate(functions)
        for j in range(repeats)
    ]


@pytest.mark.parametrize(("make", "policy", "ordered"), cases(FUNCTIONS, 3))
def test_gradient_records_what_a_call_records(make, policy, ordered):
    undecorated = make(unchanged, ordered)
    expected, value = records_of(compiled(undecorated), X)
    assert expected
    if policy == "everything":  # then loops are differentiated as without a checkpoint
        expected, _ = records_of(compiled(jax.value_and_grad(undecorated)), X)
    gradient = compiled(jax.value_and_grad(make(with_policy(policy), ordered)))
    actual, (actual_value, _) = records_of(gradient, X)
    assert_records(actual, expected, ordered)
    assert_close(actual_value, value, 1e-5)


@pytest.mark.parametrize(("make", "policy", "ordered"), cases(FUNCTIONS[:5], 1))
def test_no_derivative(make, policy, ordered):
    expected, _ = records_of(compiled(make(unchanged, ordered)), X)
    fun = make(with_policy(policy), ordered)
    assert_records(records_of(compiled(fun), X)[0], expected, ordered)


FORWARD = [f for f in FUNCTIONS if f is not function_with_rules]


@pytest.mark.parametrize(("make", "policy", "ordered"), cases(FORWARD, 1))
def test_forward_mode_and_second_order(make, policy, ordered):
    expected, _ = records_of(compiled(make(unchanged, ordered)), X)
    fun = make(with_policy(policy), ordered)
    for transformed in (
        lambda x: jax.jvp(fun, (x,), (x,)),
        lambda x: jax.jvp(jax.grad(fun), (x,), (x,)),
    ):
        assert_records(records_of(compiled(transformed), X)[0], expected, ordered)


@pytest.mark.parametrize(("make", "policy", "ordered"), cases(FUNCTIONS[:5], 1))
def test_batched(make, policy, ordered):
    # A branch on what is batched runs both, and records those not taken too.
    expected, _ = records_of(compiled(jax.vmap(make(unchanged, ordered))), XS)
    gradient = compiled(jax.vmap(jax.grad(make(with_policy(policy), ordered))))
    assert_records(records_of(gradient, XS)[0], expected, ordered)


EAGER = [plain, scan_body, nested, function_with_rules]


@pytest.mark.parametrize(("make", "policy", "ordered"), cases(EAGER, 1))
def test_outside_of_jit(make, policy, ordered):
    expected, _ = records_of(compiled(make(unchanged, ordered)), X)
    fun = make(with_policy(policy), ordered)
    assert_records(records_of(jax.grad(fun), X)[0], expected, ordered)
    _, pullback = jax.vjp(fun, X)
    assert records_of(pullback, jnp.ones(()))[0] == []


def test_print(capfd):
    @remat.checkpoint
    def fun(x):
        y = jnp.sin(x)
        jax.debug.print("y = {}", y)
        return jnp.sum(jnp.sin(y))

    for gradient in (jax.grad(fun), jax.jit(jax.grad(fun))):
        gradient(X)
        jax.effects_barrier()
        assert capfd.readouterr().out.count("y = ") == 1


def sharded(checkpoint, ordered):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))

    @checkpoint
    def fun(x):
        def body(x):
            y = jnp.sin(x)
            record(y, ordered=ordered)
            return jnp.tanh(y)

        spec = PartitionSpec("i")
        mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
        return jnp.sum(mapped(jnp.exp(x)))

    return fun


@pytest.mark.parametrize("policy", POLICIES)
def test_body_of_shard_map(policy):
    expected, _ = records_of(compiled(sharded(unchanged, False)), X)
    assert len(expected) == 2
    gradient = compiled(jax.grad(sharded(with_policy(policy), False)))
    assert_records(records_of(gradient, X)[0], expected, ordered=False)


@pytest.mark.parametrize("checkpoint", [unchanged, remat.checkpoint])
def test_ordered_effect_on_several_devices_is_refused_by_jax(checkpoint):
    with pytest.raises(ValueError, match="not supported for more than 1 device"):
        compiled(jax.grad(sharded(checkpoint, True)))(X)


def test_backward_rule_records_once():
    def make(checkpoint):
        @jax.custom_vjp
        def sine(x):
            return jnp.sin(x)

        def backward(residual, ct):
            record(residual, ct, ordered=False)
            return (residual * ct,)

        sine.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), backward)
        return checkpoint(lambda x: jnp.sum(jnp.tanh(sine(jnp.exp(x)))))

    expected, _ = records_of(compiled(jax.grad(make(unchanged))), X)
    assert len(expected) == 1
    actual, _ = records_of(compiled(jax.grad(make(remat.checkpoint))), X)
    assert_records(actual, expected, ordered=False)


# A print changes neither what is saved nor how often anything is evaluated.


def silent(*values):
    del values


def printing(*values):
    jax.debug.callback(silent, *values)


def loop(printing, ws, x):
    def step(x, w):
        h = checkpoint_name(counted(x @ w), "h")
        printing(h)
        y = checkpoint_name(counted(jnp.sin(h)) + x, "out")
        printing(x, y)
        return y, y.sum()

    x, ys = lax.scan(step, x, ws)
    return jnp.sum(x**2) + jnp.sum(jnp.sin(ys))


def branches(printing, ws, x):
    def taken(x):
        h = checkpoint_name(counted(x @ ws[0]), "h")
        printing(h)
        return checkpoint_name(counted(jnp.sin(h)), "out")

    def other(x):
        printing(x)
        return jnp.cos(x)

    return jnp.sum(lax.cond(x[0, 0] < 9.0, taken, other, x) ** 2)


def inner_checkpoint(printing, ws, x):
    @remat.checkpoint
    def inner(x):
        h = checkpoint_name(counted(x @ ws[0]), "h")
        printing(h)
        return checkpoint_name(counted(jnp.sin(h)), "out")

    return jnp.sum(inner(inner(x)) ** 2)


@pytest.mark.parametrize(
    "policy",
    [
        None,
        policies.save_only_these_names("h"),
        policies.everything_saveable,
    ],
    ids=str,
)
@pytest.mark.parametrize("body", [loop, branches, inner_checkpoint])
def test_print_changes_nothing_else(body, policy):
    args = normal(5, 4, 4), normal(3, 4)

    def measured(printing):
        fun = remat.checkpoint(partial(body, printing), policy=policy)
        saved = remat.saved_residuals(fun, *args)
        gradient = jax.value_and_grad(fun, (0, 1))
        count = sum(1 for _ in equations(jax.make_jaxpr(gradient)(*args)))
        return [(str(r.aval), r.name) for r in saved], runs_of(gradient, *args), count

    saved, runs, equation_count = measured(printing)
    without = measured(silent)
    assert (saved, runs) == without[:2]
    assert equation_count > without[2]  # so that something is printed


# Callbacks with results.


class Host:
    """A host function that returns another value at each call."""

    def __init__(self):
        self.calls: list[tuple] = []

    def __call__(self, *args):
        self.calls.append(tuple(np.round(np.asarray(a), 3).tolist() for a in args))
        return np.float32(len(self.calls))


def asked(host, *args, ordered):
    args = lax.stop_gradient(args)  # an io_callback has no derivative
    kind = jax.ShapeDtypeStruct((), jnp.float32)
    return io_callback(host, kind, *args, ordered=ordered)


def asks_plainly(checkpoint, ask):
    @checkpoint
    def fun(x):
        y = checkpoint_name(jnp.sin(x), "y")
        first = ask(y)
        second = checkpoint_name(ask(y * first), "y")
        return jnp.sum(jnp.sin(y * first) * jnp.cos(y * second))

    return fun


def asks_in_scan(checkpoint, ask):
    @checkpoint
    def fun(x):
        def step(carry, i):
            y = checkpoint_name(jnp.sin(carry * ask(i, carry)), "y")
            return jnp.sin(y * ask(y)), y

        carry, ys = lax.scan(step, x, jnp.arange(3))
        return jnp.sum(jnp.tanh(carry * ys))

    return fun


def asks_in_branch(checkpoint, ask):
    @checkpoint
    def fun(x):
        def taken(x):
            y = jnp.sin(x * ask(x))
            return jnp.sin(y * ask(y))

        return jnp.sum(jnp.tanh(lax.cond(x[0] > 0, taken, jnp.cos, jnp.exp(x))))

    return fun


def asks_in_nested_checkpoint(checkpoint, ask):
    @checkpoint
    def inner(x):
        return jnp.sin(x * ask(x))

    return checkpoint(lambda x: jnp.sum(jnp.tanh(inner(jnp.tanh(inner(x))))))


def asks_in_while_loop(checkpoint, ask):
    @checkpoint
    def fun(x):
        def body(carry):
            i, y = carry
            return i + 1, jnp.sin(y) * ask(y)

        start = (jnp.int32(0), lax.stop_gradient(x))
        _, y = lax.while_loop(lambda carry: carry[0] < 3, body, start)
        return jnp.sum(jnp.sin(x * y))

    return fun


ASKING = [
    asks_plainly,
    asks_in_scan,
    asks_in_branch,
    asks_in_nested_checkpoint,
    asks_in_while_loop,
]


@pytest.mark.parametrize(("make", "policy", "ordered"), cases(ASKING, 3))
def test_result_of_an_io_callback_is_saved(make, policy, ordered):
    def run(checkpoint):
        host = Host()
        fun = make(checkpoint, partial(asked, host, ordered=ordered))
        results = compiled(jax.value_and_grad(fun))(X)
        jax.block_until_ready(results)
        jax.effects_barrier()
        return results, host.calls

    expected, calls = run(unchanged)
    actual, actual_calls = run(with_policy(policy))
    # Each call depends on the one before, so their order is one without `ordered` too.
    assert actual_calls == calls != []
    assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize("make", [asks_plainly, asks_in_scan, asks_in_branch])
def test_io_callback_in_second_order_and_outside_of_jit(make):
    def run(checkpoint, transform):
        host = Host()
        fun = make(checkpoint, partial(asked, host, ordered=True))
        results = jax.block_until_ready(transform(fun)(X))
        jax.effects_barrier()
        return results, host.calls

    def hvp(fun):
        return compiled(lambda x: jax.jvp(jax.grad(fun), (x,), (x,)))

    for transform in (hvp, jax.grad):
        expected, calls = run(unchanged, transform)
        actual, actual_calls = run(remat.checkpoint, transform)
        assert actual_calls == calls
        assert_close(actual, expected, 1e-4)


@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
def test_effects_of_all_kinds_keep_their_order(ordered):
    def run(checkpoint):
        log = []

        def noted(label):
            def note(x):
                log.append(label)
                return np.float32(x)

            kind = jax.ShapeDtypeStruct((), jnp.float32)
            return lambda x: io_callback(
                note, kind, lax.stop_gradient(x), ordered=ordered
            )

        @checkpoint
        def fun(x):
            y = x * noted("first")(x)

            def step(carry, i):
                return jnp.sin(carry * noted("step")(carry)), None

            y, _ = lax.scan(step, y, jnp.arange(2))
            y = y * lax.cond(y > -9.0, noted("branch"), lambda x: x, y)
            return jnp.sin(y * noted("last")(y))

        value, gradient = compiled(jax.value_and_grad(fun))(jnp.float32(0.5))
        jax.block_until_ready(gradient)
        jax.effects_barrier()
        return log, value, gradient

    expected = run(unchanged)
    actual = run(remat.checkpoint)
    assert actual[0] == expected[0] == ["first", "step", "step", "branch", "last"]
    assert_close(actual[1:], expected[1:], 1e-5)


@pytest.mark.parametrize("checkpoint", [unchanged, remat.checkpoint])
def test_io_callback_of_what_is_differentiated_is_refused_by_jax(checkpoint):
    @checkpoint
    def fun(x):
        kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jnp.sum(io_callback(np.sin, kind, x))

    with pytest.raises(ValueError, match="IO callbacks do not support JVP"):
        jax.grad(fun)(X)


@pytest.mark.parametrize("checkpoint", [unchanged, remat.checkpoint])
def test_ordered_io_callback_under_vmap_is_refused_by_jax(checkpoint):
    fun = asks_plainly(checkpoint, partial(asked, Host(), ordered=True))
    with pytest.raises(ValueError, match="Cannot `vmap` ordered IO callback"):
        jax.vmap(fun)(XS)


@pytest.mark.parametrize(("policy", "again"), [("none", 1), ("everything", 0)], ids=str)
def test_pure_callback_is_recomputed_like_any_value(policy, again):
    """It is pure by what its caller promised, so a second call does no harm."""
    host = Host()

    @with_policy(policy)
    def fun(x):
        kind = jax.ShapeDtypeStruct((), jnp.float32)
        factor = jax.pure_callback(host, kind, lax.stop_gradient(x))
        return jnp.sum(jnp.sin(x * factor))

    jax.block_until_ready(compiled(jax.value_and_grad(fun))(X))
    assert len(host.calls) == 1 + again
