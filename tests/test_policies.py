"""The predefined policies: values with a readable repr that agree with JAX's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import Recompute, Saveable
from jax.extend.core import Primitive

import remat
from remat import checkpoint, checkpoint_name, policies

X = jnp.array([0.5, 1.0, 1.5])


def everything(x, w, image, kernel):
    """Equations of every kind that a predefined policy tells apart."""
    y = checkpoint_name(jnp.sin(x @ w), "a")
    z = checkpoint_name(y * 2, "b")
    batched = jnp.einsum("bij,bjk->bik", image[..., 0], image[..., 1])
    # One of the operands has no other dimension, which is a product all the same.
    vector = lax.dot(w, x[0])
    convolved = lax.conv_general_dilated(
        image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return (
        y,
        z,
        batched,
        vector,
        jnp.cumsum(convolved),
        jax.nn.softmax(x),
        w.astype(int),
    )


ARGS = (
    jnp.ones((2, 3)),
    jnp.ones((3, 3)),
    jnp.ones((2, 4, 4, 2)),
    jnp.ones((1, 1, 2, 2)),
)
EQNS = jax.make_jaxpr(everything)(*ARGS).eqns


def answers(policy):
    return [
        policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
        for eqn in EQNS
    ]


@pytest.mark.parametrize(
    ("name", "saved"),
    [
        ("everything_saveable", len(EQNS)),
        ("nothing_saveable", 0),
        ("dots_saveable", 4),
        ("checkpoint_dots", 4),
        ("dots_with_no_batch_dims_saveable", 2),
        ("checkpoint_dots_with_no_batch_dims", 2),
    ],
)
def test_policy_agrees_with_that_of_jax(name, saved):
    ours = answers(getattr(policies, name))
    assert ours == answers(getattr(jax.checkpoint_policies, name))
    assert sum(ours) == saved
    assert all(type(answer) is bool for answer in ours)


@pytest.mark.parametrize(
    ("names", "only", "but"),
    [((), 0, 2), (("a",), 1, 1), (("a", "b"), 2, 0), (("c",), 0, 2)],
    ids=str,
)
def test_policy_by_name_agrees_with_that_of_jax(names, only, but):
    for factory, saved in [
        ("save_only_these_names", only),
        ("save_any_names_but_these", but),
    ]:
        ours = answers(getattr(policies, factory)(*names))
        assert ours == answers(getattr(jax.checkpoint_policies, factory)(*names))
        assert sum(ours) == saved


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["dots_saveable", "dots_with_no_batch_dims_saveable"])
def test_scaled_products_count_as_products(name, batch):
    # JAX tells them by this name, since they are a primitive of its cuDNN library.
    scaled = Primitive("scaled_matmul_wrapper")
    avals = (jax.ShapeDtypeStruct((batch, 4, 4), jnp.float32),) * 2
    ours = getattr(policies, name)(scaled, *avals)
    theirs = getattr(jax.checkpoint_policies, name)(scaled, *avals)
    assert ours == theirs


FIRST, SECOND = (policies.save_only_these_names(name) for name in "ab")


def test_both_policies_agree_with_those_of_jax():
    ours = answers(policies.save_from_both_policies(FIRST, policies.dots_saveable))
    theirs = jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.save_only_these_names("a"),
        jax.checkpoint_policies.dots_saveable,
    )
    assert ours == answers(theirs)
    assert sum(ours) == 5


@pytest.mark.parametrize(
    ("first", "second", "saves"),
    [
        (Saveable, Recompute, True),
        (Recompute, Saveable, True),
        (Recompute, Recompute, False),
        (False, Saveable, True),
        (np.False_, np.True_, True),
        (np.False_, False, False),
        (Recompute, True, True),
    ],
)
def test_both_policies_read_marks(first, second, saves):
    both = policies.save_from_both_policies(
        lambda *_, **__: first, lambda *_, **__: second
    )
    assert answers(both) == [saves] * len(EQNS)


ALL = {
    "everything_saveable": policies.everything_saveable,
    "nothing_saveable": policies.nothing_saveable,
    "dots_saveable": policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": policies.dots_with_no_batch_dims_saveable,
    "save_only_these_names('a', 'b')": policies.save_only_these_names("b", "a"),
    "save_only_these_names()": policies.save_only_these_names(),
    "save_any_names_but_these('a')": policies.save_any_names_but_these("a", "a"),
    "save_from_both_policies(save_only_these_names('a'), dots_saveable)": (
        policies.save_from_both_policies(FIRST, policies.dots_saveable)
    ),
}


@pytest.mark.parametrize("text", ALL)
def test_repr(text):
    assert repr(ALL[text]) == text
    # It is also what makes an equal policy.
    namespace = {name: getattr(policies, name) for name in dir(policies)}
    assert eval(text, namespace) == ALL[text]


@pytest.mark.parametrize("text", ALL)
def test_frozen_and_hashable(text):
    policy = ALL[text]
    assert {policy: text}[ALL[text]] == text
    for field in [*(f.name for f in dataclasses.fields(policy)), "other"]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(policy, field, None)


def test_equal_if_and_only_if_the_same():
    for text, policy in ALL.items():
        assert [t for t, other in ALL.items() if other == policy] == [text]
    for make in (policies.save_only_these_names, policies.save_any_names_but_these):
        assert make("a", "b") == make("b", "a", "b")
        assert hash(make("a", "b")) == hash(make("b", "a"))
        assert make("a") != make("b")
    both = policies.save_from_both_policies
    assert both(FIRST, SECOND) == both(FIRST, SECOND)
    assert hash(both(FIRST, SECOND)) == hash(both(FIRST, SECOND))
    assert both(FIRST, SECOND) != both(FIRST, FIRST)


def test_aliases():
    assert policies.checkpoint_dots is policies.dots_saveable
    assert (
        policies.checkpoint_dots_with_no_batch_dims
        is policies.dots_with_no_batch_dims_saveable
    )
    assert remat.checkpoint_policies is remat.policies
    assert remat.remat is remat.checkpoint


# What a checkpoint does with the answers.


def chain(x):
    return jnp.sum(jnp.sin(jnp.sin(jnp.sin(x))))


def num_sines(policy) -> int:
    """How often the derivative of the chain evaluates a sine: three if all is saved."""
    f = checkpoint(chain, policy=policy)
    text = jax.jit(jax.value_and_grad(f)).lower(X).as_text()
    return text.count("stablehlo.sine")


@pytest.mark.parametrize(
    ("answer", "saves"),
    [
        (True, True),
        (np.True_, True),
        (np.bool_(1), True),
        (Saveable, True),
        (False, False),
        (np.False_, False),
        (Recompute, False),
    ],
    ids=lambda value: type(value).__name__ + str(bool(value)),
)
def test_answers_of_a_policy(answer, saves):
    def policy(prim, *avals, **params):
        return answer

    # What is recomputed are the two that the cosines need.
    assert num_sines(policy) == (3 if saves else 5)
    got = jax.grad(checkpoint(chain, policy=policy))(X)
    np.testing.assert_allclose(got, jax.grad(chain)(X), rtol=1e-6)


def test_no_policy_saves_nothing():
    assert num_sines(None) == num_sines(policies.nothing_saveable) == 5


def test_policy_is_asked_with_types_and_parameters():
    asked = []

    def policy(prim, *avals, **params):
        asked.append((prim.name, [aval.shape for aval in avals], params))
        return False

    w = jnp.ones((3, 2))
    jax.grad(checkpoint(lambda w: jnp.sum(jnp.sin(X @ w)), policy=policy))(w)
    by_name = {name: (shapes, params) for name, shapes, params in asked}
    assert by_name["dot_general"][0] == [(3,), (3, 2)]
    assert by_name["dot_general"][1]["dimension_numbers"] == (((0,), (0,)), ((), ()))
    assert by_name["cos"][0] == [(2,)]


def test_policy_of_jax_works():
    theirs = jax.checkpoint_policies
    assert num_sines(theirs.everything_saveable) == 3
    assert num_sines(theirs.nothing_saveable) == 5

    def named(x):
        return chain(checkpoint_name(jnp.exp(x), "a"))

    def num_exponentials(policy):
        f = checkpoint(named, policy=policy)
        text = jax.jit(jax.value_and_grad(f)).lower(X).as_text()
        return text.count("stablehlo.exponential")

    assert num_exponentials(theirs.save_only_these_names("a")) == 1
    assert num_exponentials(theirs.save_any_names_but_these("a")) == 2
