"""Policies and staging inside of loops, branches and calls.

Values and derivatives of loops and branches are compared with the undecorated function
in every composition, for the problems of `problems`. Here it is counted what is saved
and how often everything is evaluated.
"""

from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from counting import counted, runs, runs_of
from jax import lax
from jax.extend.core.primitives import closed_call_p
from problems import assert_close, compiled, normal

import remat
from remat import checkpoint_name, policies

LENGTH = 5


def layer(x, w):
    h = checkpoint_name(counted(x @ w, "h"), "h")
    return checkpoint_name(counted(jnp.sin(h), "out") + x, "out")


def layers(ws, x, **loop):
    """A scan over layers, some results per iteration, and something after it."""

    def step(x, w):
        y = layer(x, w)
        return y, y.sum()

    x, ys = lax.scan(step, x, ws, **loop)
    return jnp.sum(x**2) + jnp.sum(jnp.sin(ys))


def unrolled(ws, x):
    total = jnp.zeros(())
    for w in ws:
        x = layer(x, w)
        total = total + jnp.sin(x.sum())
    return jnp.sum(x**2) + total


ARGUMENTS = (normal(LENGTH, 4, 4), normal(3, 4))
STACK = (LENGTH, 3, 4)


def saved_shapes(fun, *args) -> Counter[tuple[int, ...]]:
    """The shapes of the residuals that are no arguments, and large."""
    return Counter(
        r.aval.shape
        for r in remat.saved_residuals(fun, *args)
        if r.aval.size >= 12 and not r.description.startswith("from the argument")
    )


def labels_of(fun, *args) -> Counter[str]:
    runs_of(fun, *args)
    return Counter(runs)


# What an iteration saves, and how often it is evaluated.


@pytest.mark.parametrize(
    ("policy", "stacks", "evaluated"),
    [
        # The loop runs forward, again for its carries, and in each backward iteration.
        (None, 0, {"h": 3, "out": 3}),
        # The carries are what is saved.
        (policies.save_only_these_names("out"), 1, {"h": 2, "out": 2}),
        # What is saved is enough to run the loop for its carries.
        (policies.save_only_these_names("h"), 1, {"h": 1, "out": 3}),
        (policies.save_only_these_names("h", "out"), 2, {"h": 1, "out": 2}),
        # The products; then counted values, sines and carries.
        (policies.dots_saveable, 1, {"h": 3, "out": 3}),
        (policies.everything_saveable, 4, {"h": 1, "out": 1}),
    ],
    ids=str,
)
@pytest.mark.parametrize("loop", [{}, {"reverse": True}, {"unroll": 2}], ids=str)
def test_scan(policy, stacks, evaluated, loop):
    fun = remat.checkpoint(partial(layers, **loop), policy=policy)
    shapes = saved_shapes(fun, *ARGUMENTS)
    assert shapes[STACK] == stacks
    final = 1 if stacks else 0  # of the carry, for the square
    assert shapes.total() <= stacks + final
    counts = labels_of(jax.value_and_grad(fun, (0, 1)), *ARGUMENTS)
    assert counts == {label: n * LENGTH for label, n in evaluated.items()}


def test_scan_evaluates_no_more_than_the_idiom_by_hand():
    by_hand = partial(layers_with, jax.checkpoint)
    whole = remat.checkpoint(layers, policy=policies.save_only_these_names("out"))
    ours, theirs = (
        labels_of(jax.value_and_grad(fun, (0, 1)), *ARGUMENTS)
        for fun in (whole, by_hand)
    )
    assert ours == theirs == {"h": 2 * LENGTH, "out": 2 * LENGTH}


def layers_with(checkpoint, ws, x):
    step = checkpoint(lambda x, w: layer(x, w))
    x, ys = lax.scan(lambda x, w: (y := step(x, w), y.sum()), x, ws)
    return jnp.sum(x**2) + jnp.sum(jnp.sin(ys))


@pytest.mark.parametrize("inner", [jax.checkpoint, remat.checkpoint])
def test_body_that_is_checkpointed_keeps_its_policy(inner):
    policy = policies.save_only_these_names("h")
    fun = remat.checkpoint(
        partial(layers_with, partial(inner, policy=policy)),
        policy=policies.save_any_names_but_these("none"),
    )
    # The inner policy lets `h` be saved, the outer one `h` and what the carry is.
    assert saved_shapes(fun, *ARGUMENTS)[STACK] == 2
    counts = labels_of(jax.value_and_grad(fun, (0, 1)), *ARGUMENTS)
    assert counts == {"h": LENGTH, "out": 2 * LENGTH}


def test_scan_in_forward_mode_evaluates_twice_at_most():
    fun = remat.checkpoint(layers, policy=policies.save_only_these_names("out"))
    counts = labels_of(lambda *a: jax.jvp(fun, a, a), *ARGUMENTS)
    assert counts == {"h": 2 * LENGTH, "out": 2 * LENGTH}


def test_scan_in_second_order_is_rematerialized():
    policy = policies.save_only_these_names("out")

    def hvp(fun):
        return lambda *a: jax.jvp(jax.grad(fun, (0, 1)), a, a)

    expected = compiled(hvp(layers))(*ARGUMENTS)
    actual = compiled(hvp(remat.checkpoint(layers, policy=policy)))(*ARGUMENTS)
    assert_close(actual, expected, tolerance=1e-5)
    again = remat.checkpoint(layers, policy=policy)
    assert runs_of(hvp(again), *ARGUMENTS) > runs_of(hvp(layers), *ARGUMENTS)


@pytest.mark.parametrize("policy", [None, policies.save_only_these_names("out")])
def test_carry_that_an_iteration_passes_on_is_not_stacked(policy):
    @partial(remat.checkpoint, policy=policy)
    def fun(x, big):
        def step(carry, _):
            y, big = carry
            return (checkpoint_name(jnp.sin(y * big.sum()), "out"), big), None

        (y, _), _ = lax.scan(step, (x, big), None, length=LENGTH)
        return y

    _, pullback = jax.vjp(fun, jnp.float32(0.5), normal(40))
    stacks = [x for x in jax.tree.leaves(pullback) if x.shape[:1] == (LENGTH,)]
    assert all(x.size <= LENGTH for x in stacks)


def test_saving_a_stack_no_smaller_than_the_carries_saves_the_carries():
    def step(x, w):
        y = checkpoint_name(counted(x @ w), "y")
        return jnp.cos(y) + x, None

    @partial(remat.checkpoint, policy=policies.save_only_these_names("y"))
    def fun(ws, x):
        return jnp.sum(lax.scan(step, x, ws)[0])

    # `y` is saved for the derivative of counted, and enough to remake the carries.
    assert saved_shapes(fun, *ARGUMENTS)[STACK] == 1
    assert runs_of(jax.value_and_grad(fun), *ARGUMENTS) == LENGTH

    def of_sum(x, w):
        y = checkpoint_name(counted(x @ w), "y")
        return jnp.sin(x) + y, None

    @partial(remat.checkpoint, policy=policies.save_only_these_names("sum"))
    def named_on_the_way(ws, x):
        def step(x, w):
            y, _ = of_sum(x, w)
            return checkpoint_name(y, "sum") * 1.0, None

        return jnp.sum(lax.scan(step, x, ws)[0])

    # To remake the carries `sum` would be needed, of the same size.
    assert saved_shapes(named_on_the_way, *ARGUMENTS)[STACK] == 1
    assert runs_of(jax.value_and_grad(named_on_the_way), *ARGUMENTS) == 2 * LENGTH


@pytest.mark.parametrize("square", [False, True])
def test_carry_named_at_the_start_of_an_iteration(square):
    @partial(remat.checkpoint, policy=policies.save_only_these_names("in"))
    def fun(ws, x):
        def step(x, w):
            x = checkpoint_name(x, "in")
            return counted(jnp.sin(x @ w)) + x, None

        y = lax.scan(step, x, ws)[0]
        return jnp.sum(y**2) if square else jnp.sum(y)

    assert saved_shapes(fun, *ARGUMENTS)[STACK] == 1
    assert runs_of(jax.value_and_grad(fun, (0, 1)), *ARGUMENTS) == 2 * LENGTH


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("saved", ["nothing", "mask", "out", "keys"])
def test_random_numbers_of_a_carried_key(implementation, saved):
    def fun(ws, x, key):
        def step(carry, w):
            x, key = carry
            key, draw = jax.random.split(key)
            mask = checkpoint_name(jax.random.bernoulli(draw, 0.5, x.shape), "mask")
            x = jnp.where(mask, jnp.sin(x @ w), 0.0) + x
            return (checkpoint_name(x, "out"), key), None

        return jnp.sum(lax.scan(step, (x, key), ws)[0][0] ** 2)

    policy = {
        "nothing": None,
        "mask": policies.save_only_these_names("mask"),
        "out": policies.save_only_these_names("out"),
        "keys": lambda prim, *avals, **params: prim.name.startswith("random_"),
    }[saved]
    arguments = (*ARGUMENTS, jax.random.key(3, impl=implementation))
    expected = compiled(jax.grad(fun, (0, 1)))(*arguments)
    checkpointed = remat.checkpoint(fun, policy=policy)
    actual = compiled(jax.grad(checkpointed, (0, 1)))(*arguments)
    assert_close(actual, expected, tolerance=1e-5)


def test_nested_scans_save_what_the_policy_says():
    @partial(remat.checkpoint, policy=policies.save_only_these_names("out"))
    def fun(ws, x):
        def outer(x, w):
            return lax.scan(lambda x, _: (layer(x, w), None), x, None, length=2)[0], ()

        return jnp.sum(lax.scan(outer, x, ws)[0])

    shapes = saved_shapes(fun, *ARGUMENTS)
    assert shapes == {(LENGTH, 2, 3, 4): 1}
    counts = labels_of(jax.value_and_grad(fun, (0, 1)), *ARGUMENTS)
    assert counts == {"h": 4 * LENGTH, "out": 4 * LENGTH}


# Branches.


def branches(index, x, w):
    def long(x):
        for _ in range(3):
            x = checkpoint_name(counted(jnp.sin(x @ w), "long"), "long")
        return x

    def short(x):
        return counted(jnp.cos(x), "short")

    return jnp.sum(lax.switch(index, [long, short], x))


BRANCHES = (normal(3, 4), normal(4, 4))


@pytest.mark.parametrize(
    ("policy", "again"),
    [(None, 1), (policies.save_only_these_names("long"), 0)],
    ids=str,
)
def test_only_the_branch_that_is_taken_is_evaluated(policy, again):
    fun = remat.checkpoint(branches, policy=policy)
    gradient = jax.value_and_grad(fun, (1, 2))
    assert labels_of(gradient, 0, *BRANCHES) == {"long": 3 * (1 + again)}
    assert labels_of(gradient, 1, *BRANCHES) == {"short": 2}


def test_branch_whose_result_is_needed_again_is_evaluated_twice_in_all():
    fun = remat.checkpoint(lambda i, x, w: branches(i, x, w) ** 2)
    assert labels_of(jax.value_and_grad(fun, (1, 2)), 0, *BRANCHES) == {"long": 6}


def test_branches_share_room():
    @partial(remat.checkpoint, policy=policies.save_any_names_but_these("none"))
    def fun(index, x):
        def branch(function):
            def run(x):
                y = checkpoint_name(counted(function(x)), "y")
                return jnp.sin(checkpoint_name(counted(y), "z"))

            return run

        return lax.switch(index, [branch(jnp.sin), branch(jnp.cos)], x).sum()

    # The derivative of a branch needs both of its values.
    assert saved_shapes(fun, 0, normal(3, 4)) == {(3, 4): 2}
    assert runs_of(jax.value_and_grad(fun, 1), 0, normal(3, 4)) == 2


@pytest.mark.parametrize("policy", ["nothing_saveable", "everything_saveable"])
def test_branches_save_no_more_than_jax_does(policy):
    def saved_bytes(fun):
        _, pullback = jax.vjp(partial(fun, 1), *BRANCHES)
        return sum(x.nbytes for x in jax.tree.leaves(pullback))

    ours = remat.checkpoint(branches, policy=getattr(policies, policy))
    theirs = jax.checkpoint(
        branches, policy=getattr(jax.checkpoint_policies, policy), static_argnums=()
    )
    assert saved_bytes(ours) <= saved_bytes(theirs)
    assert saved_bytes(ours) <= saved_bytes(branches)


# Loops without a known number of iterations.


def while_loop(x):
    return lax.while_loop(lambda x: x[0] < 3.0, lambda x: 2.0 * jnp.cosh(x), x)


def dynamic_fori_loop(x, n=3):
    return lax.fori_loop(
        0, jnp.int32(n) + x[0].astype(jnp.int32), lambda _, x: 2 * x, x
    )


@pytest.mark.parametrize("loop", [while_loop, dynamic_fori_loop])
def test_while_loop_in_forward_mode(loop):
    x = jnp.array([0.5, 0.1])
    value, tangent = jax.jvp(remat.checkpoint(loop), (x,), (x,))
    expected = jax.jvp(loop, (x,), (x,))
    assert jnp.allclose(value, expected[0])
    assert jnp.allclose(tangent, expected[1])


@pytest.mark.parametrize("loop", [while_loop, dynamic_fori_loop])
def test_while_loop_in_reverse_mode(loop):
    with pytest.raises(remat.UnsupportedError, match=r"lax\.while_loop.*Use lax\.scan"):
        jax.grad(lambda x: remat.checkpoint(loop)(x).sum())(jnp.array([0.5, 0.1]))


def test_fori_loop_with_static_bounds_is_a_scan():
    @partial(remat.checkpoint, policy=policies.save_only_these_names("out"))
    def fun(x, w):
        return jnp.sum(lax.fori_loop(0, LENGTH, lambda _, x: layer(x, w), x))

    arguments = (normal(3, 4), normal(4, 4))
    assert saved_shapes(fun, *arguments)[STACK] == 1
    counts = labels_of(jax.value_and_grad(fun, (0, 1)), *arguments)
    assert counts == {"h": 2 * LENGTH, "out": 2 * LENGTH}


# Calls.


@pytest.mark.parametrize(
    "options", [{}, {"inline": True}, {"donate_argnums": (0,)}], ids=str
)
def test_policy_reaches_into_jit(options):
    inner = jax.jit(layer, **options)

    @partial(remat.checkpoint, policy=policies.save_only_these_names("h"))
    def fun(x, w):
        return jnp.sum(jnp.sin(inner(jnp.cos(x), w)))

    arguments = (normal(3, 4), normal(4, 4))
    assert saved_shapes(fun, *arguments) == {(3, 4): 1}
    counts = labels_of(jax.value_and_grad(fun, (0, 1)), *arguments)
    assert counts == {"h": 1, "out": 2}


def test_policy_reaches_into_a_closed_call():
    jaxpr = jax.make_jaxpr(layer)(normal(3, 4), normal(4, 4))

    @partial(remat.checkpoint, policy=policies.save_only_these_names("h"))
    def fun(x, w):
        # Functions come before the operands on jax 0.10.
        given = closed_call_p.get_bind_params({"call_jaxpr": jaxpr})
        functions, params = given if isinstance(given, tuple) else ((), given)
        (y,) = closed_call_p.bind(*functions, jnp.cos(x), w, **params)
        return jnp.sum(jnp.sin(y))

    arguments = (normal(3, 4), normal(4, 4))
    counts = labels_of(jax.value_and_grad(fun, (0, 1)), *arguments)
    assert counts == {"h": 1, "out": 2}


def test_scopes_and_function_names_are_kept():
    @jax.jit
    def inner_function(x):
        with jax.named_scope("inner_scope"):
            return jnp.sin(x)

    @remat.checkpoint
    def fun(xs):
        def step(x, _):
            with jax.named_scope("step_scope"):
                return inner_function(jnp.cos(x)), None

        return lax.scan(step, xs, None, length=3)[0].sum()

    text = jax.jit(jax.value_and_grad(fun)).lower(normal(3)).as_text(debug_info=True)
    for name in ("step_scope", "inner_function", "inner_scope"):
        backward = [line for line in text.splitlines() if name in line]
        assert any("transpose" in line for line in backward)
        assert any("transpose" not in line for line in backward)


@jax.custom_batching.custom_vmap
def own_batching(x):
    return jnp.sin(x)


@own_batching.def_vmap
def own_batching_rule(size, batched, x):
    del size
    return 2.0 * jnp.sin(x), batched[0]  # so that a rule that is passed over shows


def test_custom_vmap():
    def fun(x):
        return jnp.cos(own_batching(jnp.exp(x)))

    x = normal(3)
    checkpointed = remat.checkpoint(fun)
    for transform in (
        jax.vmap,
        lambda f: partial(jax.jvp, f, (x,)),
        lambda f: jax.vmap(lambda x: jax.jvp(f, (x,), (x,))),
    ):
        argument: Any = (x,) if isinstance(transform(fun), partial) else x
        expected = transform(fun)(argument)
        assert jax.tree.all(
            jax.tree.map(jnp.allclose, transform(checkpointed)(argument), expected)
        )
    # JAX itself can't take its derivative apart, in reverse mode.
    for function in (fun, checkpointed):
        with pytest.raises(ValueError, match="reverse-mode"):
            jax.grad(lambda x, f=function: f(x).sum())(x)
