"""Wrong calls: each gets a sentence that says what was passed, and what to pass."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import Offloadable

import remat
from remat import checkpoint, checkpoint_name, policies

EITHER = policies.save_from_both_policies
X = jnp.array([0.5, 1.0, 1.5])
# The public name of what makes a mutable array has changed once.
new_ref: Callable[..., Any] = getattr(jax, "new_ref", None) or jax.array_ref  # pyright: ignore[reportAttributeAccessIssue]


def message(error: type[Exception], call: Callable[[], object]) -> str:
    """What `call` raises, which must be an `error` and no subclass of it."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    return str(caught.value)


def place(fun: Callable[..., Any]) -> str:
    code = fun.__code__
    return f"{fun.__name__} at {code.co_filename}:{code.co_firstlineno}"


def sines(x):
    return jnp.sum(jnp.sin(jnp.sin(x)))


def scaled(x, n=2):
    return x * n


# Policies.


NOT_CALLABLE = (
    "remat.checkpoint got policy={}, which is not callable. Pass a policy from "
    "remat.policies, a function policy(prim, *avals, **params) -> bool, or None to "
    "save nothing."
)


@pytest.mark.parametrize("policy", [3, True, ["a"], {}, ("a", "b")], ids=repr)
def test_policy_is_not_callable(policy):
    text = message(remat.PolicyError, lambda: checkpoint(sines, policy=policy))
    assert text == NOT_CALLABLE.format(repr(policy))


def test_policy_is_a_name():
    policy: Any = "attention"
    text = message(remat.PolicyError, lambda: checkpoint(sines, policy=policy))
    assert text == NOT_CALLABLE.format("'attention'") + (
        " To save the values with that name, pass "
        "policy=remat.policies.save_only_these_names('attention')."
    )


def test_wrong_policy_is_told_when_decorating_with_arguments():
    policy: Any = 3
    text = message(remat.PolicyError, lambda: checkpoint(policy=policy))
    assert text == NOT_CALLABLE.format(3)


@pytest.mark.parametrize(
    ("factory", "call"),
    [
        (policies.save_only_these_names, 'save_only_these_names("name")'),
        (policies.save_any_names_but_these, 'save_any_names_but_these("name")'),
        (policies.save_from_both_policies, "save_from_both_policies(first, second)"),
    ],
)
def test_policy_is_a_factory_that_was_not_called(factory, call):
    text = message(remat.PolicyError, lambda: checkpoint(sines, policy=factory))
    assert text == (
        f"remat.checkpoint got policy={factory.__name__}, which makes a policy but is "
        f"none itself. Call it: policy=remat.policies.{call}."
    )


@pytest.mark.parametrize("cls", [policies.SaveOnlyTheseNames, int])
def test_policy_is_a_class(cls):
    text = message(remat.PolicyError, lambda: checkpoint(sines, policy=cls))
    assert text == (
        f"remat.checkpoint got policy={cls.__name__}, which is a class. Pass an "
        "instance of it."
    )


@pytest.mark.parametrize("answer", [None, 0, 1, "yes", []], ids=repr)
@pytest.mark.parametrize("transform", [jax.grad, lambda f: jax.jit(jax.grad(f))])
def test_policy_gives_no_answer(answer, transform):
    def policy(prim, *avals, **params):
        return answer

    differentiated = transform(checkpoint(sines, policy=policy))
    text = message(remat.PolicyError, lambda: differentiated(X))
    assert text == (
        f"The policy {policy!r} answered {answer!r}, which is neither a bool nor one "
        "of jax.ad_checkpoint.Saveable and Recompute. Return True for an equation "
        "whose results may be saved and False for one to recompute."
    )


@pytest.mark.parametrize("answer", [Offloadable("device", "pinned_host"), Offloadable])
def test_policy_offloads(answer):
    def policy(prim, *avals, **params):
        return answer

    text = message(
        remat.PolicyError, lambda: jax.grad(checkpoint(sines, policy=policy))(X)
    )
    assert text == (
        f"The policy {policy!r} answered {answer!r}, but remat does not offload "
        "residuals to the host yet. Use a policy that saves or recomputes: for "
        "instance remat.policies.save_only_these_names with the names it offloads."
    )


def test_offloading_policy_of_jax():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["a"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    differentiated = jax.grad(
        checkpoint(lambda x: sines(checkpoint_name(jnp.sin(x), "a")), policy=policy)
    )
    text = message(remat.PolicyError, lambda: differentiated(X))
    assert "remat does not offload residuals to the host yet" in text


@pytest.mark.parametrize("wrong", ["a", None, 3], ids=repr)
@pytest.mark.parametrize("position", ["first", "second"])
def test_one_of_both_policies_is_not_callable(wrong, position):
    both = [policies.nothing_saveable, policies.nothing_saveable]
    both[("first", "second").index(position)] = wrong
    text = message(remat.PolicyError, lambda: policies.save_from_both_policies(*both))
    assert text == (
        f"save_from_both_policies got {wrong!r} as its {position} policy, which is not "
        "callable. Pass a policy from remat.policies or a function policy(prim, "
        "*avals, **params) -> bool."
    )


@pytest.mark.parametrize(
    "wrong", [policies.save_only_these_names, policies.SaveOnlyTheseNames]
)
def test_one_of_both_policies_is_none_itself(wrong):
    text = message(
        remat.PolicyError,
        lambda: policies.save_from_both_policies(policies.nothing_saveable, wrong),
    )
    assert wrong.__name__ in text
    assert "second" in text


def test_answer_of_one_of_both_policies_is_read():
    policy = policies.save_from_both_policies(
        policies.nothing_saveable, lambda *_, **__: "yes"
    )
    text = message(
        remat.PolicyError, lambda: jax.grad(checkpoint(sines, policy=policy))(X)
    )
    assert "answered 'yes', which is neither a bool nor" in text


def test_policy_cannot_be_hashed():
    @dataclass
    class Everything:
        count: int

        def __call__(self, prim, *avals, **params):
            return True

    def differentiate():
        return jax.grad(checkpoint(sines, policy=Everything(1)))(X)

    text = message(remat.PolicyError, differentiate)
    assert "policy" in text
    assert "Everything" in text
    assert "hash" in text


# Names.


FACTORIES = [policies.save_only_these_names, policies.save_any_names_but_these]


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("name", [3, None, b"a", 1.5], ids=repr)
def test_policy_name_is_no_string(factory, name):
    text = message(remat.NameArgumentError, lambda: factory("a", name))
    assert text == (
        f"{factory.__name__} got the name {name!r} of type {type(name).__name__}; "
        "names are strings, as given to remat.checkpoint_name."
    )


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("names", [["a", "b"], ("a",), {"a"}], ids=repr)
def test_policy_names_are_a_collection(factory, names):
    text = message(remat.NameArgumentError, lambda: factory(names))
    assert text == (
        f"{factory.__name__} got the name {names!r} of type {type(names).__name__}; "
        "names are strings, as given to remat.checkpoint_name. Pass the names one by "
        "one, as in *names."
    )


def test_checkpoint_name_without_a_name():
    text = message(remat.NameArgumentError, lambda: checkpoint_name(X))  # pyright: ignore[reportCallIssue]
    assert text == (
        "remat.checkpoint_name got no name. Pass the value and then its name, as in "
        'checkpoint_name(x, "x").'
    )


@pytest.mark.parametrize("name", [3, ["a"], b"a"], ids=repr)
def test_checkpoint_name_with_a_name_that_is_no_string(name):
    text = message(remat.NameArgumentError, lambda: checkpoint_name(X, name))
    assert text == (
        f"remat.checkpoint_name got name={name!r} of type {type(name).__name__}. "
        'Pass the value and then its name as a string: checkpoint_name(x, "x").'
    )


def test_checkpoint_name_with_name_and_value_swapped():
    text = message(remat.NameArgumentError, lambda: checkpoint_name("a", X))  # pyright: ignore[reportArgumentType]
    assert text.startswith("remat.checkpoint_name got name=Array([0.5, 1. , 1.5]")
    assert "Pass the value and then its name as a string" in text


@pytest.mark.parametrize(
    "value", ["text", {"w": X, "mode": "text"}], ids=["bare", "in"]
)
def test_checkpoint_name_of_something_that_is_no_array(value):
    with pytest.raises(remat.RematError) as caught:
        checkpoint_name(value, "a")
    assert "remat.checkpoint_name" in str(caught.value)
    assert "'text' of type str" in str(caught.value)


# The function.


@pytest.mark.parametrize("fun", [3, "f", (sines,)], ids=["int", "str", "tuple"])
def test_function_is_not_callable(fun):
    text = message(remat.RematError, lambda: checkpoint(fun))
    assert text == (
        f"remat.checkpoint got {fun!r} of type {type(fun).__name__} to transform, "
        "which is not callable. Pass a function, and its arguments to the function "
        "that comes back: remat.checkpoint(f)(x)."
    )


@pytest.mark.parametrize(
    "list_them", [remat.saved_residuals, remat.print_saved_residuals]
)
def test_residuals_of_what_is_not_callable(list_them):
    text = message(remat.RematError, lambda: list_them(3, X))
    assert text == (
        "remat.saved_residuals got 3 of type int, which is not callable. Pass a "
        "function, then its arguments: remat.saved_residuals(f, x)."
    )


def test_call_instead_of_function():
    called: Any = sines(X)
    text = message(remat.RematError, lambda: checkpoint(called))
    assert text.startswith("remat.checkpoint got Array(")
    assert text.endswith("that comes back: remat.checkpoint(f)(x).")


@pytest.mark.parametrize(
    ("wrong", "path"),
    [
        (lambda x: (x, "mode"), "[1]"),
        (lambda x: {"loss": x, "mode": "mode"}, "['mode']"),
        (lambda x: [x, [x, "mode"]], "[1][1]"),
    ],
    ids=["tuple", "dict", "nested"],
)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.vmap])
def test_result_is_no_array(wrong, path, transform):
    text = message(remat.UnsupportedError, lambda: transform(checkpoint(wrong))(X))
    assert path in text
    assert "'mode' of type str" in text
    assert place(wrong) in text or wrong.__name__ in text


def test_result_is_a_function():
    def makes_function(x):
        return x, sines

    text = message(remat.UnsupportedError, lambda: checkpoint(makes_function)(X))
    assert "makes_function" in text
    assert "of type function" in text


# Static arguments.


def out_of_range(argnums, position):
    return (
        f"remat.checkpoint(scaled) got static_argnums={argnums!r}, but the function "
        f"takes 2 positional arguments (x, n), so {position} is out of range. "
        "Positions count from 0."
    )


@pytest.mark.parametrize(
    ("argnums", "position"), [(2, 2), (-3, -3), ((0, 5), 5), ([1, -4], -4)]
)
def test_static_argnums_out_of_range(argnums, position):
    text = message(
        remat.StaticArgumentError, lambda: checkpoint(scaled, static_argnums=argnums)
    )
    assert text == out_of_range(argnums, position)


@pytest.mark.parametrize("argnums", [5, -5])
def test_static_argnums_out_of_range_of_a_call_with_any_number(argnums):
    def variadic(x, *rest):
        return x

    rematerialized = checkpoint(variadic, static_argnums=argnums)
    text = message(remat.StaticArgumentError, lambda: rematerialized(X, 2))
    assert "variadic" in text
    assert f"static_argnums={argnums}" in text
    assert "2" in text


def test_static_argnums_of_a_function_without_positional_arguments():
    def named(*, n):
        return n

    text = message(
        remat.StaticArgumentError, lambda: checkpoint(named, static_argnums=0)
    )
    assert text.startswith(
        "remat.checkpoint(named) got static_argnums=0, but the function takes 0 "
        "positional arguments"
    )


@pytest.mark.parametrize(
    "argnums", [1.0, "0", None, (0, (1,)), (0, True), ("x",)], ids=repr
)
def test_static_argnums_is_no_position(argnums):
    text = message(
        remat.StaticArgumentError, lambda: checkpoint(scaled, static_argnums=argnums)
    )
    assert text == (
        f"remat.checkpoint(scaled) got static_argnums={argnums!r}. Pass one position "
        "or a sequence of positions, as integers."
    )


def test_static_argnums_is_a_bool():
    text = message(
        remat.StaticArgumentError, lambda: checkpoint(scaled, static_argnums=True)
    )
    assert text.startswith("remat.checkpoint(scaled) got static_argnums=True. Pass one")


def test_static_argnums_is_an_array():
    argnums: Any = jnp.array(1.0)
    text = message(
        remat.StaticArgumentError, lambda: checkpoint(scaled, static_argnums=argnums)
    )
    assert text.startswith("remat.checkpoint(scaled) got static_argnums=")


@pytest.mark.parametrize("argnames", [3, None, ("n", 1), b"n", True], ids=repr)
def test_static_argnames_is_no_name(argnames):
    text = message(
        remat.StaticArgumentError, lambda: checkpoint(scaled, static_argnames=argnames)
    )
    assert text == (
        f"remat.checkpoint(scaled) got static_argnames={argnames!r}. Pass one argument "
        "name or several, as strings."
    )


@pytest.mark.parametrize("argnames", ["m", ("n", "m"), ["m"]], ids=repr)
def test_static_argnames_unknown(argnames):
    text = message(
        remat.StaticArgumentError, lambda: checkpoint(scaled, static_argnames=argnames)
    )
    assert text == (
        f"remat.checkpoint(scaled) got static_argnames={argnames!r}, but the function "
        "has no argument 'm'. Its arguments are x, n."
    )


UNHASHABLE = (
    "The static argument n of scaled is {} of type {}, which can't be hashed. Static "
    "arguments are part of the key under which a trace is kept: pass a hashable value "
    "(a tuple instead of a list, a frozen dataclass instead of a dict), or make the "
    "argument an ordinary one."
)


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, np.ones(1), (1, [2])], ids=repr)
@pytest.mark.parametrize("static", [{"static_argnums": 1}, {"static_argnames": "n"}])
@pytest.mark.parametrize("by_name", [False, True])
def test_static_value_cannot_be_hashed(value, static, by_name):
    f = checkpoint(scaled, **static)
    call = partial(f, X, n=value) if by_name else partial(f, X, value)
    text = message(remat.StaticArgumentError, call)
    assert text == UNHASHABLE.format(repr(value), type(value).__name__)


def test_static_value_is_shortened_in_the_message():
    value = list(range(1000))
    f = checkpoint(scaled, static_argnums=1)
    text = message(remat.StaticArgumentError, lambda: f(X, value))
    assert "[0, 1, 2, 3" in text
    assert "..." in text
    assert len(text) < 500


def test_static_value_is_traced():
    f = checkpoint(scaled, static_argnums=1)
    text = message(remat.StaticArgumentError, lambda: jax.jit(lambda n: f(X, n))(2.0))
    assert text.startswith("The static argument n of scaled is a value that is traced")
    assert text.endswith("Make it static there too, or close over it instead.")


def test_static_value_is_traced_for_the_residuals():
    f = checkpoint(scaled, static_argnums=1)

    def calls(x, n):
        return f(x, n)

    text = message(
        remat.StaticArgumentError, lambda: remat.saved_residuals(calls, X, 2)
    )
    assert "remat.saved_residuals" in text
    assert remat.saved_residuals(lambda x: f(x, 2), X) == []


# Values that are needed in Python.


def needs_value(which, fun, remedy):
    return (
        f"The function {place(fun)}, given to remat.checkpoint, needs {which} in "
        "Python (in an `if`, a shape or an index), but it is traced, so it has none. "
        "If it is a flag or a size rather than data, make it static: "
        f"remat.checkpoint({fun.__name__}, static_argnames={remedy!r}), or "
        "static_argnums with its position. If it is data, use jax.lax.cond or "
        "jnp.where."
    )


def branches(x, n):
    return x if n > 0 else -x


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: f,
        jax.jit,
        lambda f: jax.vmap(f, in_axes=(0, None)),
        lambda f: jax.grad(lambda x, n: jnp.sum(f(x, n))),
        lambda f: jax.jit(jax.grad(lambda x, n: jnp.sum(f(x, n)))),
    ],
    ids=["eager", "jit", "vmap", "grad", "jit-grad"],
)
def test_branch_on_a_traced_argument(transform):
    f = transform(checkpoint(branches))
    text = message(remat.TracedValueError, lambda: f(X, 1))
    assert text == needs_value("the value of the argument n", branches, "n")


def test_branch_on_a_traced_argument_passed_by_name():
    f = checkpoint(branches)
    text = message(remat.TracedValueError, lambda: f(X, n=1))
    assert text == needs_value("the value of the argument n", branches, "n")


def test_branch_on_a_traced_argument_within_a_nested_checkpoint():
    outer = checkpoint(lambda x, n: checkpoint(branches)(x, n))
    text = message(remat.TracedValueError, lambda: outer(X, 1))
    assert text == needs_value("the value of the argument n", branches, "n")


def test_the_error_of_jax_is_kept_as_the_cause():
    with pytest.raises(remat.TracedValueError) as caught:
        checkpoint(branches)(X, 1)
    assert isinstance(caught.value.__cause__, jax.errors.TracerBoolConversionError)


def by_while(x, n):
    while n > 0:
        x, n = x + x, n - 1
    return x


def by_not(x, n):
    return x if not n else -x


def by_membership(x, n):
    return x if n in (1, 2) else -x


def by_bool(x, n):
    return x * float(bool(n))


def by_int(x, n):
    return x * int(n)


def by_float(x, n):
    return x * float(n)


def by_range(x, n):
    return sum(x for _ in range(n))


def by_index(x, n):
    return [x, x, x][n]


def by_arange(x, n):
    return x[jnp.arange(n)]


def by_axis(x, n):
    return jnp.sum(x[None, None], axis=n)


def by_asarray(x, n):
    return x * np.asarray(n, np.float32)


def by_numpy_function(x, n):
    return x * np.sin(n)


def by_item(x, n):
    return x * n.item()


def by_zeros(x, n):
    return x[0] + jnp.zeros(n)


def by_reshape(x, n):
    return jnp.reshape(x, (n, -1))


def by_broadcast(x, n):
    return jnp.broadcast_to(x, (n, 3))


NEED_VALUES = [
    by_while,
    by_not,
    by_membership,
    by_bool,
    by_int,
    by_float,
    by_range,
    by_index,
    by_arange,
    by_axis,
    by_asarray,
    by_numpy_function,
    by_item,
    by_zeros,
    by_reshape,
    by_broadcast,
]


@pytest.mark.parametrize("fun", NEED_VALUES)
def test_value_of_a_traced_argument(fun):
    text = message(remat.TracedValueError, lambda: checkpoint(fun)(X, 1))
    assert text == needs_value("the value of the argument n", fun, "n")


@pytest.mark.parametrize("fun", NEED_VALUES)
def test_the_remedy_helps(fun):
    if fun is by_item:
        pytest.skip("a static int has no item()")
    x = jnp.ones(3)
    expected = fun(x, 1)
    got = checkpoint(fun, static_argnames="n")(x, 1)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_mask_that_is_traced():
    def masked(x):
        return jnp.sum(x[x > 1])

    text = message(remat.TracedValueError, lambda: checkpoint(masked)(X))
    assert place(masked) in text
    assert "jnp.where" in text


def test_path_of_the_argument_within_a_pytree():
    def configured(params, config):
        return params["w"] if config["deep"][1] else -params["w"]

    f = checkpoint(configured)
    call = partial(f, {"w": X}, {"deep": (1, True)})
    assert message(remat.TracedValueError, call) == needs_value(
        "the value of the argument config['deep'][1]", configured, "config"
    )


def two(a, b):
    return a if jnp.sum(a * b) > 0 else b


def three(a, b, c):
    return a if jnp.sum(a * b * c) > 0 else b


def one_of_two(a, b):
    return a if jnp.sum(b) > 0 else -a


def one_of_prefixes(x, x_n):
    return x if x_n > 0 else -x


@pytest.mark.parametrize(
    ("fun", "guilty"),
    [(two, "ab"), (three, "abc"), (one_of_two, "b"), (one_of_prefixes, ["x_n"])],
)
def test_all_guilty_arguments_are_named_and_no_other(fun, guilty):
    num_args = fun.__code__.co_argcount
    text = message(
        remat.TracedValueError, lambda: checkpoint(fun)(*[jnp.ones(())] * num_args)
    )
    plural = "s" if len(guilty) > 1 else ""
    remedy = tuple(guilty) if len(guilty) > 1 else guilty[0]
    assert text == needs_value(
        f"the value of the argument{plural} {', '.join(guilty)}", fun, remedy
    )


def test_argument_among_any_number():
    def variadic(x, *rest):
        return x if rest[1] > 0 else -x

    text = message(remat.TracedValueError, lambda: checkpoint(variadic)(X, 1, 2))
    assert "the value of the argument rest[1]" in text
    # A name can't stand for one of *rest.
    assert "static_argnums=2" in text
    assert "static_argnames='rest'" not in text
    np.testing.assert_array_equal(checkpoint(variadic, static_argnums=2)(X, 1, 2), X)


def test_positional_only_argument():
    def positional(x, n, /):
        return x if n > 0 else -x

    text = message(remat.TracedValueError, lambda: checkpoint(positional)(X, 1))
    assert text == needs_value("the value of the argument n", positional, "n")
    got = checkpoint(positional, static_argnames="n")(X, 1)
    np.testing.assert_array_equal(got, X)


def test_value_that_was_closed_over():
    def outer(y):
        def closes(x):
            return x if y > 0 else -x

        return checkpoint(closes)(X)

    # JAX's own error is as good, since no argument of `closes` is to blame.
    with pytest.raises(
        (remat.TracedValueError, jax.errors.TracerBoolConversionError)
    ) as caught:
        jax.jit(outer)(1.0)
    text = str(caught.value)
    assert "closes at " in text
    # The argument is innocent, and making it static would only lead to the next error.
    assert "static_argnames='x'" not in text


@pytest.mark.parametrize(
    ("loops", "caller"), [(False, "jit"), (True, "scan")], ids=["jit", "scan"]
)
def test_value_in_an_inner_function(loops, caller):
    def inner(n, _=None):
        return (n if n > 0 else -n), None

    def outer(x, n):
        if loops:
            return x, jax.lax.scan(inner, n, x)
        return x, jax.jit(inner)(n)

    with pytest.raises(
        (remat.TracedValueError, jax.errors.TracerBoolConversionError)
    ) as caught:
        checkpoint(outer)(X, 1.0)
    text = str(caught.value)
    # It is the n of the inner function, whatever that of the outer one may be.
    assert "inner at " in text
    assert "static_argnames=('x', 'n')" not in text
    assert caller in text


def test_value_in_a_partial_and_in_a_method():
    class Model:
        def apply(self, x, n):
            return branches(x, n)

    for f, name in [
        (partial(branches, X), "branches"),
        (partial(Model().apply, X), "apply"),
    ]:
        text = message(remat.TracedValueError, partial(checkpoint(f), 1))
        assert "the value of the argument n" in text
        assert f"remat.checkpoint({name}, static_argnames='n')" in text


# Arguments that are no data.


@pytest.mark.parametrize("value", ["mode", b"mode", jnp.sin, object, np.str_("a")])
@pytest.mark.parametrize("by_name", [False, True])
def test_argument_is_no_array(value, by_name):
    f = checkpoint(scaled)
    call = partial(f, X, n=value) if by_name else partial(f, X, value)
    text = message(remat.UnsupportedError, call)
    shown = repr(value)
    assert text == (
        f"The argument n of scaled is {shown if len(shown) <= 60 else shown[:57]}"
        f"{'' if len(shown) <= 60 else '...'} of type {type(value).__name__}, which "
        "JAX can't trace. Mark it static: remat.checkpoint(scaled, "
        "static_argnames='n')."
    )


class Unhashable:
    __hash__ = None  # pyright: ignore[reportAssignmentType]


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (np.array(["a"]), "Pass an array of numbers"),
        (np.array([None, 1]), "Pass an array of numbers"),
        (np.array(["2000-01-01"], "datetime64[D]"), "Pass an array of numbers"),
        ({1, 2}, "Convert it to an array"),
        (bytearray(b"a"), "Convert it to an array"),
        (Unhashable(), "Convert it to an array"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("inside", [False, True], ids=["bare", "in a list"])
def test_argument_is_no_array_and_cannot_be_static(value, remedy, inside):
    argument = [X, value] if inside else value
    text = message(remat.UnsupportedError, lambda: checkpoint(scaled)(X, argument))
    assert text.startswith(f"The argument n{'[1]' * inside} of scaled is ")
    assert text.endswith(
        f"of type {type(value).__name__}, which JAX can't trace. Nor can it be static, "
        f"since it can't be hashed. {remedy}, or close over it."
    )
    kept = checkpoint(lambda x: x if argument is not None else -x)
    np.testing.assert_array_equal(kept(X), X)


def test_argument_is_an_integer_that_is_too_large():
    text = message(remat.UnsupportedError, lambda: checkpoint(scaled)(X, 2**70))
    assert text.startswith(f"The argument n of scaled is {2**70} of type int")


def test_argument_is_no_array_within_a_pytree():
    def configured(params):
        return params["w"]

    text = message(
        remat.UnsupportedError, lambda: checkpoint(configured)({"w": X, "mode": "a"})
    )
    assert text.startswith(
        "The argument params['mode'] of configured is 'a' of type str, which JAX can't "
        "trace."
    )
    # The whole dict can't be static, since it has an array in it.
    assert "static_argnames='params'" not in text


def test_argument_is_no_array_within_an_object():
    @jax.tree_util.register_dataclass
    @dataclass
    class Block:
        w: jax.Array
        kind: str

    def applied(block):
        return block.w

    text = message(remat.UnsupportedError, lambda: checkpoint(applied)(Block(X, "a")))
    assert text.startswith("The argument block.kind of applied is 'a' of type str")
    assert "static_argnames" not in text
    assert "Pass it as an argument of its own and mark that static" in text


@pytest.mark.parametrize(
    "policy", [lambda prim: True, lambda prim, *avals: True, lambda *avals, name: True]
)
@pytest.mark.parametrize(
    "use", [lambda p: checkpoint(scaled, policy=p), lambda p: EITHER(p, p)]
)
def test_policy_with_another_signature(policy, use):
    text = message(remat.PolicyError, lambda: use(policy))
    assert "Give it the signature policy(prim, *avals, **params)." in text


def test_argument_is_no_array_among_any_number():
    def variadic(x, *rest):
        return x

    text = message(remat.UnsupportedError, lambda: checkpoint(variadic)(X, "a"))
    assert text.startswith("The argument rest[0] of variadic is 'a' of type str")
    assert "static_argnums=1" in text
    np.testing.assert_array_equal(checkpoint(variadic, static_argnums=1)(X, "a"), X)


def test_method_of_a_class_that_is_no_pytree():
    class Model:
        @checkpoint
        def apply(self, x):
            return x

    text = message(remat.UnsupportedError, lambda: Model().apply(X))
    assert text.startswith("The argument self of apply is <")
    assert text.endswith("remat.checkpoint(apply, static_argnames='self').")


@pytest.mark.parametrize("args", [(), (X, 1, 2)])
def test_wrong_number_of_arguments_is_told_by_python(args):
    with pytest.raises(TypeError, match=r"scaled\(\) (missing|takes)"):
        checkpoint(scaled)(*args)


# prevent_cse.


def product(a, b):
    return jnp.sum(jnp.sin(a["w"]) * b)


@pytest.mark.parametrize(
    "flags", ["no", 1, 0, (True, 1), ("a", True), ({"w": 0}, True)], ids=repr
)
def test_prevent_cse_is_no_bool(flags):
    f = checkpoint(product, prevent_cse=flags)
    text = message(remat.RematError, lambda: f({"w": X}, X))
    assert text == f"remat.checkpoint got prevent_cse={flags!r}. Pass bools only."


@pytest.mark.parametrize(
    "flags",
    [None, (True,), (True, True, True), ({"v": True}, True), {"w": True}, ((), True)],
    ids=repr,
)
def test_prevent_cse_is_no_prefix(flags):
    f = checkpoint(product, prevent_cse=flags)
    text = message(remat.RematError, lambda: f({"w": X}, X))
    assert text == (
        f"remat.checkpoint got prevent_cse={flags!r}, which is no prefix of the "
        "arguments. Pass True, False, or a tuple with an entry for each positional "
        "argument that isn't static: a bool, or a container of bools like the argument."
    )


# Mutable arrays.


def mutable(what, fun):
    return (
        f"The function {place(fun)}, given to remat.checkpoint, {what}. A recomputed "
        "read would see the value as it is by then, not as it was, and a recomputed "
        "write would happen twice. Pass the Ref's value instead (ref[...]) and write "
        "the result back outside of the checkpointed function."
    )


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.grad])
def test_ref_closed_over(writes, transform):
    ref = new_ref(X)

    def closes(x):
        if writes:
            ref[...] = jnp.zeros(3)
            return jnp.sum(x)
        return jnp.sum(ref[...] * x)

    text = message(remat.UnsupportedError, lambda: transform(checkpoint(closes))(X))
    assert text == mutable("closes over a mutable Ref", closes)
    if writes:  # the error came before anything was done
        np.testing.assert_array_equal(ref[...], X)


def test_ref_closed_over_by_an_inner_jit():
    ref = new_ref(X)

    def closes(x):
        return jax.jit(lambda x: ref[...] * x)(x)

    text = message(remat.UnsupportedError, lambda: checkpoint(closes)(X))
    assert text == mutable("closes over a mutable Ref", closes)


@pytest.mark.parametrize("reads", [True, False])
def test_ref_given(reads):
    def takes(r, x):
        return r[...] * x if reads else x

    text = message(remat.UnsupportedError, lambda: checkpoint(takes)(new_ref(X), X))
    assert text == mutable("is given the mutable Ref r", takes)


def test_ref_given_in_a_pytree():
    def takes(state, x):
        return state["r"][...] * x

    text = message(
        remat.UnsupportedError, lambda: checkpoint(takes)({"r": new_ref(X)}, X)
    )
    assert text == mutable("is given the mutable Ref state['r']", takes)


def test_ref_returned():
    def returns(x):
        return new_ref(x)

    text = message(remat.UnsupportedError, lambda: checkpoint(returns)(X))
    assert place(returns) in text
    assert "mutable Ref" in text


# Names that occur nowhere.


def named_twice(x):
    y = checkpoint_name(jnp.sin(x), "attention")
    z = checkpoint_name(jnp.cos(y), "mlp")
    return jnp.sum(y * z)


def unnamed(x):
    return jnp.sum(jnp.sin(x))


def named_in_jit(x):
    return jax.jit(named_twice)(x)


def named_in_scan(x):
    def body(carry, x):
        return checkpoint_name(jnp.sin(carry * x), "carry"), None

    return jax.lax.scan(body, 1.0, x)[0]


def named_in_branch(x):
    def named(x):
        return checkpoint_name(jnp.sin(x), "branch")

    return jnp.sum(jax.lax.cond(x[0] > 0, named, jnp.cos, x))


@jax.custom_vjp
def sine(x):
    return jnp.sin(x)


sine.defvjp(
    lambda x: (jnp.sin(x), checkpoint_name(jnp.cos(x), "residual")),
    lambda cos, ct: (cos * ct,),
)


def named_in_forward_rule(x):
    return jnp.sum(sine(x))


def named_in_forward_rule_in_jit(x):
    return jnp.sum(jax.jit(sine)(x))


def named_in_forward_rule_in_scan(x):
    return jax.lax.scan(lambda carry, x: (sine(carry * x), None), 1.0, x)[0]


def named_in_checkpoint(x):
    return checkpoint(named_twice)(x)


def named_in_forward_rule_in_checkpoint(x):
    return jnp.sum(checkpoint(sine)(x))


def named_in_checkpoint_of_jax(x):
    return jax.checkpoint(named_twice)(x)


NAMED = {
    unnamed: (),
    named_twice: ("attention", "mlp"),
    named_in_jit: ("attention", "mlp"),
    named_in_scan: ("carry",),
    named_in_branch: ("branch",),
    named_in_forward_rule: ("residual",),
    named_in_forward_rule_in_jit: ("residual",),
    named_in_forward_rule_in_scan: ("residual",),
    named_in_checkpoint: ("attention", "mlp"),
    named_in_forward_rule_in_checkpoint: ("residual",),
    named_in_checkpoint_of_jax: ("attention", "mlp"),
}


def saving(fun, *names):
    return checkpoint(fun, policy=policies.save_only_these_names(*names))


def warned(call: Callable[[], object]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [w for w in caught if w.category is remat.UnknownNameWarning]


@pytest.mark.parametrize("fun", NAMED)
def test_unknown_name(fun):
    (warning,) = warned(lambda: jax.grad(saving(fun, "atention"))(X))
    occurring = ", ".join(repr(name) for name in NAMED[fun])
    present = (
        f"The names that do occur are {occurring}."
        if occurring
        else "No value of the function is named; name one with "
        "remat.checkpoint_name(x, name)."
    )
    assert str(warning.message) == (
        "The policy save_only_these_names('atention') names 'atention', which occurs "
        f"nowhere in the function {place(fun)}, so nothing is saved for it. {present}"
    )
    assert warning.filename == __file__


@pytest.mark.parametrize("fun", [f for f in NAMED if NAMED[f]])
def test_known_names(fun):
    assert not warned(lambda: jax.grad(saving(fun, *NAMED[fun]))(X))
    assert not warned(lambda: jax.grad(saving(fun, NAMED[fun][0]))(X))


def test_several_unknown_names():
    (warning,) = warned(lambda: jax.grad(saving(named_twice, "c", "mlp", "b"))(X))
    assert str(warning.message).startswith(
        "The policy save_only_these_names('b', 'c', 'mlp') names 'b', 'c', which occur "
    )
    assert str(warning.message).endswith(
        "The names that do occur are 'attention', 'mlp'."
    )


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda f: jax.grad(f)(X),
        lambda f: jax.jit(jax.grad(f))(X),
        lambda f: jax.vmap(jax.grad(f))(X[None]),
        lambda f: jax.grad(lambda x: jnp.sum(jax.vmap(f)(x)))(X[None]),
        lambda f: jax.jvp(f, (X,), (X,)),
        lambda f: jax.linearize(f, X),
        lambda f: jax.vjp(f, X),
        lambda f: jax.hessian(f)(X),
    ],
    ids=["grad", "jit", "vmap-grad", "grad-vmap", "jvp", "linearize", "vjp", "hessian"],
)
def test_unknown_name_is_told_once_when_differentiated(differentiate):
    (warning,) = warned(lambda: differentiate(saving(named_twice, "mpl")))
    assert "names 'mpl', which occurs nowhere" in str(warning.message)
    assert warning.filename == __file__


def test_unknown_name_is_not_told_by_a_forward_call():
    assert not warned(lambda: saving(named_twice, "mpl")(X))


def test_unknown_name_is_told_for_each_of_both_policies():
    both = policies.save_from_both_policies(
        policies.save_only_these_names("mpl"), policies.save_only_these_names("mlp")
    )
    (warning,) = warned(lambda: jax.grad(checkpoint(named_twice, policy=both))(X))
    assert "names 'mpl', which occurs nowhere" in str(warning.message)


def test_unknown_name_of_a_nested_checkpoint():
    def outer(x):
        return saving(named_twice, "mpl")(x)

    (warning,) = warned(lambda: jax.grad(checkpoint(outer))(X))
    assert place(named_twice) in str(warning.message)


def test_excluded_name_may_be_unknown():
    policy = policies.save_any_names_but_these("mpl")
    assert not warned(lambda: jax.grad(checkpoint(named_twice, policy=policy))(X))


def test_unknown_name_can_be_made_an_error():
    # Twice: what was kept of the first, interrupted trace does not hide it.
    for _ in range(2):
        with pytest.raises(
            remat.UnknownNameWarning, match="'mpl', which occurs nowhere"
        ):
            jax.grad(saving(named_twice, "mpl"))(X)


def test_errors_have_one_base():
    errors = [getattr(remat, name) for name in remat.__all__ if name.endswith("Error")]
    assert len(errors) > 4
    assert all(issubclass(error, remat.RematError) for error in errors)
