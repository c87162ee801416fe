"""Staged programs: the same results, and barriers where the schedule puts them."""

import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, Var, jaxpr_as_fun

from remat import checkpoint, checkpoint_name, policies
from remat._stage import depends_on, staged

BARRIER = "optimization_barrier"


def program(fun, *args) -> ClosedJaxpr:
    jaxpr = jax.make_jaxpr(fun)(*args)
    assert not jaxpr.consts
    return jaxpr


def names(jaxpr) -> list[str]:
    return [eqn.primitive.name for eqn in jaxpr.eqns]


def barriers(jaxpr):
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == BARRIER]


def check_same_results(jaxpr, rewritten, *args):
    expected = jaxpr_as_fun(jaxpr)(*args)
    got = jaxpr_as_fun(rewritten)(*args)
    assert rewritten.in_avals == jaxpr.in_avals
    assert rewritten.out_avals == jaxpr.out_avals
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def check_goes_on_with_what_barriers_give(jaxpr):
    """Nothing reads a value from before a barrier that ties it."""
    replaced: set[Var] = set()
    for eqn in jaxpr.eqns:
        assert not replaced.intersection(
            v for v in eqn.invars if not isinstance(v, Literal)
        )
        if eqn.primitive.name == BARRIER:
            replaced.update(eqn.invars)
    assert not replaced.intersection(
        v for v in jaxpr.jaxpr.outvars if not isinstance(v, Literal)
    )


# x, w -> recomputed y and z; then ct -> what a derivative would give.


def chain(x, w, ct):
    y = lax.sin(lax.dot(x, w))
    z = lax.tanh(lax.dot(y, w))
    dz = lax.mul(ct, z)
    dy = lax.mul(dz, y)
    return dy, lax.dot(x, dy)


CHAIN_ARGS = (jnp.full((3, 3), 0.5), jnp.full((3, 3), 0.1), jnp.ones((3, 3)))
CHAIN = program(chain, *CHAIN_ARGS)


def two_chains(x, w, ct):
    dy = lax.mul(ct, lax.exp(lax.sin(x)))
    dz = lax.mul(dy, lax.exp(lax.tanh(w)))
    return dy, dz


TWO_CHAINS = program(two_chains, *CHAIN_ARGS)


@pytest.mark.parametrize("jaxpr", [CHAIN, TWO_CHAINS], ids=["one", "two"])
@pytest.mark.parametrize(
    "prevent_cse",
    [(True, True, True), (True, False, True), (False, True, False), (False,) * 3],
    ids=str,
)
def test_staged_computes_the_same(jaxpr, prevent_cse):
    rewritten = staged(jaxpr, 1, prevent_cse)
    check_same_results(jaxpr, rewritten, *CHAIN_ARGS)
    check_goes_on_with_what_barriers_give(rewritten)
    assert any(prevent_cse) == (BARRIER in names(rewritten))
    without_barriers = [n for n in names(rewritten) if n != BARRIER]
    assert Counter(without_barriers) == Counter(names(jaxpr))


def test_one_barrier_before_one_group():
    rewritten = staged(CHAIN, 1, (True,) * 3)
    recomputation = ["dot_general", "sin", "dot_general", "tanh"]
    backward = ["mul", "mul", "dot_general"]
    assert names(rewritten) == [BARRIER, *recomputation, *backward]
    x, w, ct = CHAIN.jaxpr.invars
    (barrier,) = barriers(rewritten)
    assert set(barrier.invars) == {x, w, ct}


def test_recomputation_moves_to_where_it_is_needed():
    rewritten = staged(TWO_CHAINS, 1, (True,) * 3)
    assert names(TWO_CHAINS) == ["sin", "exp", "mul", "tanh", "exp", "mul"]
    assert names(rewritten) == [
        BARRIER, "sin", "exp", "mul", BARRIER, "tanh", "exp", "mul",
    ]  # fmt: skip
    early = program(lambda x, w, ct: two_chains_recomputed_first(x, w, ct), *CHAIN_ARGS)
    assert names(early) == ["sin", "exp", "tanh", "exp", "mul", "mul"]
    assert names(staged(early, 1, (True,) * 3)) == names(rewritten)


def two_chains_recomputed_first(x, w, ct):
    y, z = lax.exp(lax.sin(x)), lax.exp(lax.tanh(w))
    dy = lax.mul(ct, y)
    return dy, lax.mul(dy, z)


def test_barrier_ties_what_is_still_needed():
    rewritten = staged(TWO_CHAINS, 1, (True,) * 3)
    first, second = barriers(rewritten)
    x, w, ct = TWO_CHAINS.jaxpr.invars
    dy = rewritten.eqns[3].outvars[0]
    assert set(first.invars) == {x, ct}
    # dy is a result too, and is returned as it comes out of the barrier.
    assert set(second.invars) == {dy, w}
    out = second.outvars[second.invars.index(dy)]
    assert rewritten.jaxpr.outvars[0] is out
    assert rewritten.eqns[-1].invars[0] is out


@pytest.mark.parametrize("kept_apart", [(True, False), (False, True)])
def test_operands_without_prevent_cse_are_in_no_barrier(kept_apart):
    rewritten = staged(TWO_CHAINS, 1, (*kept_apart, True))
    tied = {v for eqn in barriers(rewritten) for v in eqn.invars}
    for operand, kept in zip(TWO_CHAINS.jaxpr.invars, kept_apart, strict=False):
        assert (operand in tied) == kept
    # The group that starts from the other operand alone has no barrier.
    assert len(barriers(rewritten)) == 1


def test_no_prevent_cse_leaves_the_program_alone():
    assert staged(CHAIN, 1, (False,) * 3) is CHAIN


def test_nothing_to_recompute_leaves_the_program_alone():
    jaxpr = program(lambda x, ct: lax.mul(x, lax.sin(ct)), 1.0, 2.0)
    assert staged(jaxpr, 1, (True, True)) is jaxpr


def test_recomputation_that_nothing_needs_is_dropped():
    def wasteful(x, ct):
        lax.tanh(x)
        return lax.mul(ct, lax.exp(lax.sin(x)))

    jaxpr = program(wasteful, 1.0, 2.0)
    assert names(jaxpr) == ["tanh", "sin", "exp", "mul"]
    rewritten = staged(jaxpr, 1, (True, True))
    assert names(rewritten) == [BARRIER, "sin", "exp", "mul"]
    check_same_results(jaxpr, rewritten, 1.0, 2.0)


def test_results_that_are_operands_literals_or_recomputed():
    def odd(x, ct):
        return x, 2.0, lax.sin(lax.cos(x)), lax.mul(ct, 3.0), ct, x

    jaxpr = program(odd, 1.0, 2.0)
    rewritten = staged(jaxpr, 1, (True, True))
    check_same_results(jaxpr, rewritten, 1.0, 2.0)
    check_goes_on_with_what_barriers_give(rewritten)
    assert len(barriers(rewritten)) == 1


def test_staging_is_cached():
    assert staged(CHAIN, 1, (True,) * 3) is staged(CHAIN, 1, (True,) * 3)


def test_dependence_on_the_cotangents():
    *_, ct = CHAIN.jaxpr.invars
    assert depends_on(CHAIN.eqns, [ct]) == [False] * 4 + [True] * 3
    assert not any(depends_on(CHAIN.eqns, []))


@st.composite
def backward_programs(draw):
    """A random program of scalars that is linear in its last operand only by name."""
    unary, binary = [lax.sin, lax.cos, lax.neg], [lax.add, lax.mul]
    steps = draw(
        st.lists(
            st.tuples(st.booleans(), st.integers(0, 99), st.integers(0, 99)),
            max_size=10,
        )
    )
    num_results = draw(st.integers(0, 3))
    flags = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))

    def fun(x, w, ct):
        recomputed, values = [x, w], [x, w, ct]
        for backward, i, j in steps:
            source = values if backward else recomputed
            a, b = source[i % len(source)], source[j % len(source)]
            made = unary[i % 3](a) if j % 2 else binary[i % 2](a, b)
            values.append(made)
            if not backward:
                recomputed.append(made)
        return values[-num_results:] if num_results else ()

    return program(fun, 0.5, 0.25, 2.0), flags


@settings(max_examples=60)
@given(backward_programs())
def test_any_program_computes_the_same(drawn):
    jaxpr, flags = drawn
    rewritten = staged(jaxpr, 1, flags)
    check_same_results(jaxpr, rewritten, 0.5, 0.25, 2.0)
    check_goes_on_with_what_barriers_give(rewritten)
    if not any(flags):
        assert not barriers(rewritten)


# What compilers get.


def layers(ws, x):
    for w in ws:
        x = checkpoint_name(jnp.sin(x @ w), "layer")
    return jnp.sum(x)


WS = [jnp.eye(16)] * 4
XS = jnp.ones((32, 16))


def lowered(f):
    return jax.jit(jax.value_and_grad(f)).lower(WS, XS)


def count_in(stage: jax.stages.Lowered, primitive: str) -> int:
    """How many equations of `primitive` its executable has, inside fusions too."""
    text = stage.compile().as_text()
    assert text is not None
    return len(re.findall(rf"\b{primitive}\(", text))


def test_prevent_cse_false_emits_no_barrier():
    f = checkpoint(layers, prevent_cse=False)
    assert BARRIER not in lowered(f).as_text()
    named = checkpoint(
        layers,
        prevent_cse=False,
        policy=policies.save_only_these_names("layer"),
    )
    assert BARRIER not in lowered(named).as_text()


@pytest.mark.parametrize(
    ("prefix", "emitted"),
    [
        ((False, False), False),
        (([False] * 4, False), False),
        ((True, False), True),
        ((False, True), True),
        (([True, False, False, False], False), True),
    ],
    ids=str,
)
def test_prevent_cse_prefix(prefix, emitted):
    f = checkpoint(layers, prevent_cse=prefix)
    assert (BARRIER in lowered(f).as_text()) == emitted
    value, grads = jax.value_and_grad(f)(WS, XS)
    # Compiled too, since the order of a sum is not that of an eager call.
    expected_value, expected_grads = jax.jit(jax.value_and_grad(layers))(WS, XS)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    for a, b in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_input_without_prevent_cse_is_in_no_barrier():
    # Told apart by their types. The backward pass comes to x first, so that nothing of
    # the type of w is made before the last recomputation.
    def f(w, x):
        return jnp.sum(jnp.exp(jnp.sin(w))) + jnp.sum(jnp.exp(jnp.sin(x)))

    def barrier_types(prevent_cse):
        g = checkpoint(f, prevent_cse=prevent_cse)
        text = (
            jax.jit(jax.grad(g, argnums=(0, 1)))
            .lower(jnp.ones(7), jnp.ones(5))
            .as_text()
        )
        lines = [line for line in text.splitlines() if BARRIER in line]
        return set(re.findall(r"tensor<(\d)xf32>", "\n".join(lines)))

    assert barrier_types(True) == {"5", "7"}
    assert barrier_types((True, True)) == {"5", "7"}
    assert barrier_types((False, True)) == {"5"}
    assert barrier_types((False, False)) == set()


def test_closed_over_value_is_kept_apart_only_by_true():
    def grad_text(prevent_cse):
        def of_w(w):
            f = checkpoint(
                lambda: jnp.sum(jnp.exp(jnp.sin(w))), prevent_cse=prevent_cse
            )
            return f()

        return jax.jit(jax.value_and_grad(of_w)).lower(jnp.ones(7)).as_text()

    assert BARRIER in grad_text(True)
    assert BARRIER not in grad_text(())
    assert BARRIER not in grad_text(False)


@pytest.mark.parametrize("names_saved", [0, 1])
def test_a_barrier_for_each_group_of_recomputation(names_saved):
    policy = policies.save_only_these_names("layer") if names_saved else None
    text = lowered(checkpoint(layers, policy=policy)).as_text()
    # Named outputs cut the recomputation into one group for each layer.
    assert text.count(BARRIER) == (len(WS) if names_saved else 1)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_recomputation_survives_compilation(transform):
    def count(f, primitive):
        return count_in(lowered(transform(f)), primitive)

    num = len(WS)
    # Forward; then for each layer products for the cotangents of w and x, but for x
    # not that of the first layer.
    products = num + 2 * num - 1
    assert count(layers, "dot") == products
    assert count(checkpoint(layers), "dot") == products + num
    assert count(checkpoint(layers, prevent_cse=False), "dot") == products
    saved = checkpoint(layers, policy=policies.everything_saveable)
    assert count(saved, "dot") == products
    assert count(checkpoint(layers), "sine") > count(layers, "sine")


def test_recomputation_survives_in_a_backward_pass_called_eagerly():
    _, pullback = jax.vjp(checkpoint(layers), WS, XS)
    dots = count_in(jax.jit(pullback).lower(jnp.float32(1.0)), "dot")
    assert dots == len(WS) + 2 * len(WS)


def test_second_order_is_staged_too():
    def f(x):
        return jnp.sin(jnp.exp(jnp.sin(x)))

    def num_barriers(f):
        second = jax.jit(jax.grad(jax.grad(f)))
        return second.lower(1.0).as_text().count(BARRIER)

    assert num_barriers(f) == 0
    assert num_barriers(checkpoint(f)) > 0
    assert num_barriers(partial(checkpoint, prevent_cse=False)(f)) == 0
