"""Functions with derivative rules of their own: what is saved in a rule, and how often
the forward rule is evaluated.

Every count comes with the values and gradients of the same compiled program. The rules
here are also problems, whose compositions are tested elsewhere.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from counting import counted, runs
from jax import lax
from problems import assert_close, compiled, normal

import remat
from remat import checkpoint_name, policies

ITERATIONS = 3
X = normal(3, 3)


@dataclass(frozen=True)
class Rule:
    """A function with a rule, and the names of all that its backward rule needs."""

    function: Any
    names: tuple[str, ...]
    forward: bool = False
    twice: bool = True  # whether it can be differentiated in reverse mode twice


RULES: dict[str, Rule] = {}


def rule(*names: str, **known: Any) -> Any:
    def register(make):
        RULES[make.__name__] = Rule(make(), names, **known)
        return make

    return register


# Derivatives are off by a factor, so that a rule that is passed over shows.


@rule("y", forward=True)
def custom_jvp():
    @jax.custom_jvp
    def function(x):
        return counted(jnp.sin(x), "primal")

    @function.defjvp
    def function_jvp(primals, tangents):
        (x,), (t,) = primals, tangents
        y = checkpoint_name(counted(jnp.sin(x), "rule"), "y")
        return y, 3.0 * t * y * y

    return function


@rule("y")
def custom_vjp():
    @jax.custom_vjp
    def function(x):
        return counted(x @ x.T, "primal") @ x

    def forward(x):
        y = checkpoint_name(counted(x @ x.T, "rule"), "y")
        return y @ x, (x, y)

    def backward(residuals, ct):
        x, y = residuals
        return (3.0 * y.T @ ct + ct @ x,)

    function.defvjp(forward, backward)
    return function


@rule("tree")
def pytrees():
    """Arguments that aren't differentiated, residuals of all kinds and of none."""

    @partial(jax.custom_vjp, nondiff_argnums=(0, 2))
    def scaled(scale, tree, flag, index, none):
        del flag, index, none
        return counted(tree["x"] @ tree["w"], "primal") * scale

    def forward(scale, tree, flag, index, none):
        assert flag is True
        y = counted(tree["x"] @ tree["w"], "rule")
        found = {"mask": y > 0, "best": jnp.argmax(y, 1).astype(jnp.int32), "none": ()}
        found = checkpoint_name({**found, "y": y}, "tree")
        return found["y"] * scale, (found, tree, index, none, True, None)

    def backward(scale, flag, residuals, ct):
        assert flag is True
        found, tree, index, none, _, _ = residuals
        assert none is None
        best = jax.nn.one_hot(found["best"], 3) * index.astype(jnp.float32)
        d = jnp.where(found["mask"], found["y"], best) * ct * scale
        return {"x": d @ tree["w"].T, "w": tree["x"].T @ d, "count": None}, None, None

    scaled.defvjp(forward, backward)

    def function(x):
        tree = {"x": x, "w": jnp.cos(x), "count": jnp.int32(3)}
        return scaled(2.0, tree, True, jnp.int32(1), None)

    return function


@rule("y")
def symbolic_zeros():
    @jax.custom_vjp
    def product(x, y):
        return counted(x @ y, "primal")

    def forward(x, y):
        z = checkpoint_name(counted(x.value @ y.value, "rule"), "y")
        assert x.perturbed
        assert not y.perturbed
        return z, (z, y.value if x.perturbed else None, None)

    def backward(residuals, ct):
        z, y, none = residuals
        assert none is None
        return 3.0 * ct @ y.T * z, None

    product.defvjp(forward, backward, symbolic_zeros=True)
    return lambda x: product(x, jnp.ones((3, 3)))


@rule("y", twice=False)
def optimize_remat():
    """The function itself is called where the residuals are not needed."""

    @jax.custom_vjp
    def function(x):
        return counted(jnp.sin(x), "primal")

    def forward(x):
        y = checkpoint_name(counted(jnp.sin(x), "rule"), "y")
        return y, (y.astype(jnp.bfloat16), jax.jit(jnp.cos)(y))

    def backward(residuals, ct):
        low, cos = residuals
        return (3.0 * ct * low.astype(ct.dtype) * cos,)

    function.defvjp(forward, backward, optimize_remat=True)
    return function


@rule("first", "second")
def several_names():
    """In a call, in a nested checkpoint; the residuals are made of what is named."""

    @jax.custom_vjp
    def function(x):
        return jnp.sin(x)

    @remat.checkpoint
    def make_first(x):
        return checkpoint_name(counted(jnp.sin(x), "first"), "first")

    @jax.jit
    def make_second(first):
        return checkpoint_name(counted(first @ first, "second"), "second")

    @jax.jit
    def forward(x):
        first = make_first(x)
        second = make_second(first)
        return second, (first.astype(jnp.bfloat16), jnp.exp(second), first > 0)

    def backward(residuals, ct):
        first, second, mask = residuals
        return (3.0 * jnp.where(mask, ct * second, first.astype(ct.dtype)),)

    function.defvjp(forward, backward)
    return function


@rule("steps", "final", twice=False)
def loops():
    """Loops and branches in the forward rule, one that has no derivative itself."""

    @jax.custom_vjp
    def function(x):
        return jnp.sin(x)

    def forward(x):
        def step(carry, _):
            y = checkpoint_name(counted(jnp.sin(carry), "steps"), "steps")
            return y, y

        def body(carry):
            n, y = carry
            return n + 1, counted(jnp.cos(y), "while")

        last, steps = lax.scan(step, x, None, length=2)
        start = (jnp.int32(0), last)
        _, looped = lax.while_loop(lambda carry: carry[0] < 2, body, start)
        looped = checkpoint_name(looped, "final")
        final = lax.cond(
            x[0, 0] > -99,
            lambda y: checkpoint_name(counted(y, "branch"), "final"),
            lambda y: y,
            looped,
        )
        return final, (steps, looped, final)

    def backward(residuals, ct):
        steps, looped, final = residuals
        return (3.0 * ct * steps.sum(0) * looped * final,)

    function.defvjp(forward, backward)
    return function


def plain(f, x):
    return jnp.sum(jnp.sin(f(jnp.cos(x))))


def in_jit(f, x):
    return jnp.sum(jnp.sin(jax.jit(lambda x: f(jnp.cos(x)))(x)))


def in_vmap(f, x):
    batch = jnp.stack([x, 2.0 * x])
    return jnp.sum(jax.vmap(lambda x: jnp.sin(f(jnp.cos(x))))(batch))


def in_cond(f, x):
    taken = x[0, 0] > -99
    return jnp.sum(lax.cond(taken, lambda x: jnp.sin(f(jnp.cos(x))), jnp.sin, x))


def in_map(f, x):
    """A loop whose iterations do not depend on each other."""
    scales = jnp.arange(1.0, ITERATIONS + 1)
    return jnp.sum(lax.map(lambda s: jnp.sin(f(jnp.cos(s * x))), scales))


def in_scan(f, x):
    def step(carry, scale):
        return jnp.sin(f(jnp.cos(carry * scale))), None

    return jnp.sum(lax.scan(step, x, jnp.arange(1.0, ITERATIONS + 1))[0])


def in_scan_of_conds(f, x):
    def step(carry, index):
        return lax.cond(index < 2, lambda x: jnp.sin(f(x)), jnp.cos, carry), None

    return jnp.sum(lax.scan(step, x, jnp.arange(ITERATIONS))[0])


PLACES = {
    f.__name__: f
    for f in (plain, in_jit, in_vmap, in_cond, in_map, in_scan, in_scan_of_conds)
}


def loss(name, place, x):
    return PLACES[place](RULES[name].function, x)


def values_and_counts(fun, *args) -> tuple[Any, Counter[str]]:
    runs.clear()
    values = jax.block_until_ready(compiled(jax.value_and_grad(fun))(*args))
    return values, Counter(runs)


@cache
def undecorated(name, place):
    """Values, gradients and what is evaluated without a checkpoint: all of it once."""
    return values_and_counts(partial(loss, name, place), X)


def saving(name):
    return policies.save_only_these_names(*RULES[name].names)


def evaluations(name, place, policy) -> float:
    """How often the forward rule is evaluated, relative to the undecorated function."""
    expected, once = undecorated(name, place)
    fun = remat.checkpoint(partial(loss, name, place), policy=policy)
    actual, counts = values_and_counts(fun, X)
    assert_close(actual, expected, 1e-5)
    if name not in ("several_names", "loops"):
        assert set(once) == {"rule"}
    return counts.total() / once.total()


# Of the rules that are special in the same way one is enough in every place.
EVERYWHERE = [(name, "plain") for name in RULES] + [
    ("optimize_remat" if place in ("in_cond", "in_scan") else "pytrees", place)
    for place in PLACES
    if place != "plain"
]
EVERYWHERE += [("custom_jvp", "in_scan"), ("symbolic_zeros", "in_scan")]


@pytest.mark.parametrize(("name", "place"), EVERYWHERE)
def test_once_where_all_that_is_needed_is_saved(name, place):
    assert evaluations(name, place, saving(name)) == 1


@pytest.mark.parametrize(("name", "place"), EVERYWHERE)
def test_twice_where_nothing_is_saved(name, place):
    # A loop is run again for what is carried into each iteration.
    times = {"in_scan": 3, "in_scan_of_conds": 3}.get(place, 2)
    assert evaluations(name, place, None) == times


@pytest.mark.parametrize("name", RULES)
def test_once_where_everything_is_saved(name):
    assert evaluations(name, "plain", policies.everything_saveable) == 1


@pytest.mark.parametrize(
    ("names", "first", "second"),
    [(("first",), 1, 2), (("second",), 2, 1), (("first", "second"), 1, 1)],
)
def test_only_what_is_not_saved_is_evaluated_again(names, first, second):
    policy = policies.save_only_these_names(*names)
    fun = remat.checkpoint(partial(loss, "several_names", "plain"), policy=policy)
    assert values_and_counts(fun, X)[1] == {"first": first, "second": second}


@pytest.mark.parametrize(
    ("outer", "inner", "times"),
    [(None, None, 3), (None, "y", 2), ("y", "y", 1), ("y", None, 2)],
)
def test_rule_in_a_nested_checkpoint(outer, inner, times):
    """What the inner policy saves is recomputed with the rest of the outer one.

    Without an inner policy the inner checkpoint evaluates the rule again by itself,
    whatever the outer one saves.
    """

    def policy(name):
        return name and policies.save_only_these_names(name)

    function = remat.checkpoint(
        lambda x: jnp.sin(RULES["custom_vjp"].function(x)), policy=policy(inner)
    )
    fun = remat.checkpoint(partial(plain, function), policy=policy(outer))
    actual, counts = values_and_counts(fun, X)
    expected, _ = values_and_counts(partial(plain, function.__wrapped__), X)
    assert_close(actual, expected, 1e-5)
    assert counts == {"rule": times}


@pytest.mark.parametrize("reads_result", [False, True])
def test_backward_rule_that_reads_the_input_alone(reads_result):
    """Nothing calls for a second evaluation, unless what follows reads the result."""

    @jax.custom_vjp
    def function(x):
        return jnp.sin(x)

    function.defvjp(
        lambda x: (counted(jnp.sin(x), "rule"), x), lambda x, ct: (3.0 * ct * x,)
    )

    @remat.checkpoint
    def fun(x):
        y = function(jnp.exp(x))
        return jnp.sum(jnp.sin(y) if reads_result else y)

    assert values_and_counts(fun, X)[1] == {"rule": 1 + reads_result}


@pytest.mark.parametrize(("policy", "times"), [(None, 2), ("y", 1)])
def test_two_calls_with_the_same_input(policy, times):
    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def function(label, x):
        return counted(jnp.sin(x), label)

    def forward(label, x):
        y = checkpoint_name(counted(jnp.sin(x), label), "y")
        return y, y

    function.defvjp(forward, lambda label, y, ct: (3.0 * ct * y,))

    def fun(x):
        x = jnp.exp(x)
        a: Any = function("a", x)
        b: Any = function("b", x)
        return jnp.sum(jnp.sin(a) * b)

    if policy is not None:
        policy = policies.save_only_these_names(policy)
    actual, counts = values_and_counts(remat.checkpoint(fun, policy=policy), X)
    assert_close(actual, values_and_counts(fun, X)[0], 1e-5)
    assert counts == {"a": times, "b": times}


def without_rule(kind):
    """A function with a rule that has nothing to do here, and a name in it."""

    def sine(x):
        return checkpoint_name(counted(jnp.sin(x), "primal"), "y")

    if kind == "custom_vmap":
        function = jax.custom_batching.custom_vmap(sine)
        function.def_vmap(lambda size, batched, x: (sine(x), batched[0]))
        return function
    if kind == "custom_jvp":
        function = jax.custom_jvp(sine)
        function.defjvp(lambda x, t: (function(*x), 3.0 * t[0]))
    else:
        function = jax.custom_vjp(sine)
        function.defvjp(lambda x: (function(x), x), lambda x, ct: (3.0 * ct * x,))
    return function


@pytest.mark.parametrize(("policy", "times"), [(None, 2), ("y", 1)])
@pytest.mark.parametrize("kind", ["custom_jvp", "custom_vjp", "custom_vmap"])
def test_rule_that_is_not_asked_for(kind, policy, times):
    """A call that is not differentiated stays one, and its result may be saved."""
    function = without_rule(kind)

    def fun(w, x):
        return jnp.sum(jnp.sin(function(jnp.exp(x)) * w))

    if policy is not None:
        policy = policies.save_only_these_names(policy)
    checkpointed = remat.checkpoint(fun, policy=policy)
    actual, counts = values_and_counts(checkpointed, X, X)
    assert_close(actual, values_and_counts(fun, X, X)[0], 1e-5)
    assert counts == {"primal": times}
    if kind != "custom_vmap":  # the rule is still there for the next derivative

        def mixed(fun):
            first = jax.grad(fun)
            return compiled(jax.grad(lambda x: jnp.sum(first(X, x) ** 2)))(X)

        assert_close(mixed(checkpointed), mixed(fun), 1e-4)


def test_results_of_one_call_saved_and_not():
    @jax.custom_jvp
    def both(x):
        return checkpoint_name(counted(jnp.sin(x), "a"), "a"), counted(jnp.cos(x), "b")

    both.defjvp(lambda x, t: (both(*x), (t[0], t[0])))

    @partial(remat.checkpoint, policy=policies.save_only_these_names("a"))
    def fun(w, x):
        a, b = both(jnp.exp(x))
        return jnp.sum(jnp.sin(a * w) * jnp.sin(b * w))

    # What is saved is not asked for a second time.
    assert values_and_counts(fun, X, X)[1] == {"a": 1, "b": 2}


@pytest.mark.parametrize("name", [name for name, r in RULES.items() if r.forward])
@pytest.mark.parametrize("place", ["plain", "in_scan"])
def test_forward_mode(name, place):
    function = partial(loss, name, place)
    expected = compiled(lambda x: jax.jvp(function, (x,), (x,)))(X)
    checkpointed = remat.checkpoint(function, policy=saving(name))
    run = compiled(lambda x: jax.jvp(checkpointed, (x,), (x,)))
    runs.clear()
    assert_close(jax.block_until_ready(run(X)), expected, 1e-5)
    assert runs["rule"] == (1 if place == "plain" else ITERATIONS)


@pytest.mark.parametrize("name", RULES)
def test_second_derivatives_and_batches(name):
    def derivatives(function):
        gradient = jax.grad(function)

        def run(x):
            of_batch = jax.vmap(gradient)(jnp.stack([x, jnp.cos(x)]))
            results = [of_batch, jax.jvp(gradient, (x,), (x,))]
            if RULES[name].twice:
                results.append(jax.grad(lambda x: jnp.sum(gradient(x) ** 2))(x))
            return results

        return compiled(run)(X)

    function = partial(loss, name, "plain")
    checkpointed = remat.checkpoint(function, policy=saving(name))
    assert_close(derivatives(checkpointed), derivatives(function), 1e-4)
