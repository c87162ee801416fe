"""Checkpoints inside of checkpoints, with policies of their own."""

from functools import cache

import jax
import jax.numpy as jnp
import pytest
from counting import counted, equations, runs, runs_of
from problems import assert_close, compiled, normal

import remat
from remat import checkpoint_name, policies

POLICIES = {
    "nothing": None,
    "hidden": policies.save_only_these_names("hidden"),
    "out": policies.save_only_these_names("out"),
    "both": policies.save_only_these_names("hidden", "out"),
    "everything": policies.everything_saveable,
}
ARGUMENTS = (normal(3, 4), normal(4, 4))
CHECKPOINTS = {"remat": remat.checkpoint, "jax": jax.checkpoint}


def layer(x, w):
    hidden = checkpoint_name(counted(x @ w, "hidden"), "hidden")
    return checkpoint_name(counted(jnp.sin(hidden), "out"), "out")


def nested(inner, outer, inner_policy, outer_policy):
    region = inner(layer, policy=POLICIES[inner_policy])
    return outer(
        lambda x, w: jnp.sum(jnp.sin(region(x, w))), policy=POLICIES[outer_policy]
    )


def evaluated(fun):
    runs_of(jax.value_and_grad(fun, (0, 1)), *ARGUMENTS)
    return runs["hidden"], runs["out"]


# The table of docs/inside.md, and more.
TABLE = [
    ("nothing", "nothing", [], (3, 3)),
    ("nothing", "hidden", ["hidden"], (2, 3)),
    ("nothing", "out", ["out"], (2, 2)),
    ("nothing", "everything", ["output of cos"], (2, 2)),
    ("hidden", "nothing", [], (2, 3)),
    ("hidden", "hidden", ["hidden"], (1, 3)),
    ("hidden", "out", ["out"], (2, 2)),
    ("hidden", "both", ["hidden", "out"], (1, 2)),
    ("out", "nothing", [], (3, 2)),
    ("out", "out", ["out"], (2, 1)),
    ("both", "both", ["hidden", "out"], (1, 1)),
    ("everything", "nothing", [], (2, 2)),
    ("everything", "both", ["hidden", "out"], (1, 1)),
]


@pytest.mark.parametrize("library", CHECKPOINTS)
@pytest.mark.parametrize(("inner", "outer", "kept", "counts"), TABLE)
def test_what_is_kept_and_how_often_it_is_evaluated(
    library, inner, outer, kept, counts
):
    fun = nested(CHECKPOINTS[library], remat.checkpoint, inner, outer)
    residuals = [
        r.name or r.description.partition(" from ")[0]
        for r in remat.saved_residuals(fun, *ARGUMENTS)
        if not r.description.startswith("from the argument")
    ]
    assert sorted(residuals) == kept
    assert evaluated(fun) == counts


@pytest.mark.parametrize(("inner", "outer", "kept", "counts"), TABLE)
def test_no_more_evaluations_than_with_jax(inner, outer, kept, counts):
    del kept
    theirs = evaluated(nested(jax.checkpoint, jax.checkpoint, inner, outer))
    if (inner, outer) == ("nothing", "everything"):
        assert theirs == (1, 1)  # the outer policy overrides the inner one there
    else:
        assert all(ours <= other for ours, other in zip(counts, theirs, strict=True))


def twice_differentiated(fun):
    return lambda *args: jax.jvp(jax.value_and_grad(fun, (0, 1)), args, args)


@cache
def expected():
    def plain(x, w):
        return jnp.sum(jnp.sin(layer(x, w)))

    return compiled(twice_differentiated(plain))(*ARGUMENTS)


@pytest.mark.parametrize("library", CHECKPOINTS)
@pytest.mark.parametrize("inner", POLICIES)
@pytest.mark.parametrize("outer", POLICIES)
def test_values_and_gradients(library, inner, outer):
    fun = nested(CHECKPOINTS[library], remat.checkpoint, inner, outer)
    actual = compiled(twice_differentiated(fun))(*ARGUMENTS)
    assert_close(actual, expected(), tolerance=1e-5)


def test_inner_checkpoint_of_jax_becomes_one_of_ours():
    fun = nested(jax.checkpoint, remat.checkpoint, "nothing", "nothing")
    jaxpr = jax.make_jaxpr(jax.grad(fun))(*ARGUMENTS)
    names = {eqn.primitive.name for eqn in equations(jaxpr)}
    assert "remat" in names
    assert "remat2" not in names  # that of `jax.checkpoint`


def test_recomputation_inside_an_inner_checkpoint_is_staged():
    def wide(x, w):
        for _ in range(8):
            x = jnp.tanh(jnp.sin(x @ w))
        return checkpoint_name(x, "out")

    def loss(checkpoint, x, w):
        for _ in range(3):
            x = checkpoint(wide)(x, w)
        return jnp.sum(x**2)

    x = jax.ShapeDtypeStruct((1024, 64), jnp.float32)
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    policy = policies.save_only_these_names("out")

    def temp_bytes(checkpoint, transform=lambda f: f):
        fun = transform(lambda x, w: loss(checkpoint, x, w))
        lowered = jax.jit(jax.value_and_grad(fun, 1)).lower(x, w)
        memory = lowered.compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    def whole(f):
        return remat.checkpoint(f, policy=policy)

    by_ours = temp_bytes(remat.checkpoint)
    assert temp_bytes(jax.checkpoint, whole) <= 1.02 * by_ours
    assert temp_bytes(remat.checkpoint, whole) <= 1.02 * by_ours


def test_inner_policy_that_offloads_is_a_named_error():
    offload = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    region = jax.checkpoint(layer, policy=offload)
    fun = remat.checkpoint(lambda x, w: jnp.sum(region(x, w)))
    with pytest.raises(remat.PolicyError, match="offload"):
        jax.grad(fun)(*ARGUMENTS)
