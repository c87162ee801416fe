"""Nested checkpoints evaluate each function as often as theory says.

Halving a chain of n functions, with the second half of each part checkpointed, repeats
T(n) = 2 T(n/2) + n/2 evaluations in the backward pass, and none at n = 2.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counted, evaluations, runs_of
from problems import assert_close, normal

import remat
from remat import policies

X = np.linspace(-1, 1, 3, dtype=np.float32)


def halve(functions, checkpoint=remat.checkpoint):
    if len(functions) == 1:
        return functions[0]
    middle = len(functions) // 2
    if middle == 1:
        first, second = functions
        return lambda x: first(second(x))
    first = halve(functions[:middle], checkpoint)
    second = halve(functions[middle:], checkpoint)
    return lambda x: first(checkpoint(second)(x))


def chain(length, **kwargs):
    functions = [lambda x, i=i: counted(x, label=str(i)) for i in range(length)]
    return halve(functions, **kwargs)


def gradient(fun):
    """With the value, since without it the last forward evaluation would be dead."""
    return jax.value_and_grad(lambda x: fun(x).sum())


EXTRA = {2: 0, 4: 2, 8: 8, 16: 24}


@pytest.mark.parametrize(("length", "extra"), EXTRA.items())
def test_halving(length, extra):
    assert evaluations(gradient(chain(length)), X) == length + extra


@pytest.mark.parametrize(("length", "extra"), EXTRA.items())
def test_halving_repeats_no_more_than_the_original(length, extra):
    original = gradient(chain(length, checkpoint=jax.checkpoint))
    assert evaluations(original, X) == length + extra


@pytest.mark.parametrize(("length", "extra"), EXTRA.items())
def test_halving_when_it_runs(length, extra):
    assert runs_of(gradient(chain(length)), X) == length + extra


@pytest.mark.parametrize("length", [4, 8])
def test_halving_gives_the_same_gradient(length):
    plain = gradient(chain(length, checkpoint=lambda f: f))
    assert_close(jax.jit(gradient(chain(length)))(X), jax.jit(plain)(X), 1e-5)


@pytest.mark.parametrize("length", [4, 8])
def test_halving_under_vmap(length):
    mapped = jax.vmap(gradient(chain(length)))
    assert evaluations(mapped, np.stack([X, X])) == length + EXTRA[length]


@pytest.mark.parametrize("lengths", [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_two_in_a_row(lengths):
    """Each is evaluated twice, neither because of the other."""

    def repeat(n, label):
        def f(x):
            for _ in range(n):
                x = counted(x, label=label)
            return x

        return f

    f1, f2 = (repeat(n, str(i)) for i, n in enumerate(lengths))
    checkpointed = gradient(lambda x: remat.checkpoint(f2)(remat.checkpoint(f1)(x)))
    assert evaluations(checkpointed, X) == 2 * sum(lengths)
    assert runs_of(checkpointed, X) == 2 * sum(lengths)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_checkpoint_of_checkpoint(depth):
    """The inner one's operands are at hand, so the outer one repeats nothing."""
    fun = lambda x: counted(counted(x))  # noqa: E731
    for _ in range(depth):
        fun = remat.checkpoint(fun)
    assert evaluations(gradient(fun), X) == 2 + 2
    assert runs_of(gradient(fun), X) == 2 + 2


@pytest.mark.parametrize("inner", [1, 2, 3])
def test_checkpoint_inside_checkpoint(inner):
    """The outer one repeats `first` alone, the inner one `second`."""

    def first(x):
        return counted(x, label="first")

    def second(x):
        for _ in range(inner):
            x = counted(x, label="second")
        return x

    fun = gradient(remat.checkpoint(lambda x: remat.checkpoint(second)(first(x))))
    assert evaluations(fun, X) == runs_of(fun, X) == 2 * (1 + inner)


@pytest.mark.parametrize(
    ("policy", "extra"),
    [
        (None, 3),
        (policies.everything_saveable, 0),
        (policies.nothing_saveable, 3),
        (policies.dots_saveable, 3),
        (policies.save_only_these_names("second"), 2),
        (policies.save_any_names_but_these("second"), 2),
        (policies.save_any_names_but_these("other"), 1),
        (lambda prim, *_, **params: params.get("label") == "2", 2),
    ],
)
def test_saved_values_are_not_evaluated_again(policy, extra):
    def f(x):
        x = remat.checkpoint_name(counted(x, label="0"), "first")
        x = remat.checkpoint_name(counted(x, label="1"), "second")
        return counted(x, label="2")

    checkpointed = gradient(remat.checkpoint(f, policy=policy))
    assert evaluations(checkpointed, X) == 3 + extra
    assert runs_of(checkpointed, X) == 3 + extra


def test_in_scan_body():
    @remat.checkpoint
    def body(x, _):
        return counted(counted(x)), None

    checkpointed = gradient(lambda x: jax.lax.scan(body, x, None, length=5)[0])
    assert runs_of(checkpointed, X) == 5 * (2 + 2)


def test_in_cond_branch():
    branch = remat.checkpoint(lambda x: counted(counted(x)))

    def f(flag, x):
        return jax.lax.cond(flag, branch, jnp.sin, x).sum()

    derivative = jax.value_and_grad(f, 1)
    assert runs_of(derivative, True, X) == 2 + 2
    assert runs_of(derivative, False, X) == 0


def test_value_without_derivative_is_evaluated_once():
    f = remat.checkpoint(lambda x: counted(counted(x)))
    assert evaluations(f, X) == runs_of(f, X) == 2


def products(fun, *args):
    """How many 8 by 8 products the compiled `fun` evaluates."""
    cost = jax.jit(fun).lower(*args).compile().cost_analysis()
    assert cost is not None
    return cost["flops"] / (2 * 8**3)


def network(w, x):
    for _ in range(4):
        x = jnp.sin(x @ w)
    return x


W = normal(8, 8)


def test_forward_mode_repeats_nothing_once_compiled():
    def tangent(f):
        return lambda w, x: jax.jvp(f, (w, x), (x, w))

    ours = products(tangent(remat.checkpoint(network)), W, W)
    assert ours == pytest.approx(products(tangent(network), W, W), rel=0.05)


@pytest.mark.parametrize("policy", [None, policies.dots_saveable])
def test_reverse_mode_repeats_products_unless_saved(policy):
    def gradient(f):
        return jax.value_and_grad(lambda w, x: f(w, x).sum(), (0, 1))

    checkpointed = remat.checkpoint(network, policy=policy)
    extra = products(gradient(checkpointed), W, W) - products(gradient(network), W, W)
    assert extra == pytest.approx(4 if policy is None else 0, abs=0.3)
