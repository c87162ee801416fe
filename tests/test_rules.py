"""The primitive has a rule for everything that JAX may do to it."""

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters import ad, batching
from jax.interpreters import partial_eval as pe
from problems import normal

import remat


@pytest.fixture
def primitive():
    (eqn,) = jax.make_jaxpr(remat.checkpoint(jnp.sin))(1.0).eqns
    return eqn.primitive


def test_evaluation():
    assert jnp.allclose(remat.checkpoint(jnp.sin)(1.0), jnp.sin(1.0))


def test_primitive_is_named_remat(primitive):
    assert primitive.name == "remat"
    assert primitive.multiple_results


@pytest.mark.parametrize(
    "registry",
    [ad.primitive_jvps, ad.primitive_transposes, pe.dce_rules],
    ids=["jvp", "transpose", "dce"],
)
def test_registry_has_a_rule(primitive, registry):
    assert callable(registry[primitive])


def test_batching_rule(primitive):
    assert primitive in batching.fancy_primitive_batchers


def test_abstract_evaluation():
    (out,) = jax.make_jaxpr(remat.checkpoint(jnp.sin))(normal(3)).out_avals
    assert out == jax.typeof(jnp.sin(normal(3)))


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu"])
def test_lowering_for_every_platform(platform):
    f = remat.checkpoint(lambda x: jnp.sin(jnp.sin(x)).sum())
    exported = jax.export.export(jax.jit(jax.grad(f)), platforms=[platform])(normal(3))
    text = exported.mlir_module()
    assert text.count("stablehlo.sine") + text.count("stablehlo.cosine") == 3
    assert "optimization_barrier" in text


def test_lowering_for_two_platforms():
    f = remat.checkpoint(lambda x: jnp.sin(jnp.sin(x)).sum())
    exported = jax.export.export(jax.jit(jax.grad(f)), platforms=["cpu", "tpu"])
    x = normal(3)
    actual = exported(x).call(x)
    assert jnp.allclose(actual, jax.grad(f)(x), rtol=1e-5)


def test_shape_polymorphism():
    f = remat.checkpoint(lambda x: jnp.sin(jnp.sin(x)).sum())
    (batch,) = jax.export.symbolic_shape("b")
    spec = jax.ShapeDtypeStruct((batch, 3), jnp.float32)
    exported = jax.export.export(jax.jit(jax.grad(f)))(spec)
    for size in (2, 5):
        x = normal(size, 3)
        assert jnp.allclose(exported.call(x), jax.grad(f)(x), rtol=1e-5)


def test_dead_results_are_dropped():
    """Of two independent chains only that of the result in use is evaluated."""
    f = remat.checkpoint(lambda x, y: (jnp.sin(x), jnp.cos(y)))
    jaxpr = jax.make_jaxpr(jax.jit(lambda x, y: f(x, y)[0]))(1.0, 2.0).jaxpr
    live, used = pe.dce_jaxpr(jaxpr, [True])
    assert used == [True, False]
    text = str(live)
    assert "sin" in text
    assert "cos" not in text


def test_dead_call_is_dropped():
    f = remat.checkpoint(jnp.sin)
    jaxpr = jax.make_jaxpr(lambda x: (f(x), x * 2)[1])(1.0).jaxpr
    live, _ = pe.dce_jaxpr(jaxpr, [True])
    assert [eqn.primitive.name for eqn in live.eqns] == ["mul"]


def test_effects_are_not_dead():
    def printed(x):
        jax.debug.print("{}", x)
        return jnp.sin(x), jnp.cos(x)

    jaxpr = jax.make_jaxpr(lambda x: (remat.checkpoint(printed)(x), x * 2)[1])(1.0)
    live, _ = pe.dce_jaxpr(jaxpr.jaxpr, [True])
    text = str(live)
    assert "debug" in text
    assert "sin" not in text
    assert "cos" not in text


def test_dead_code_in_reverse_mode():
    """A gradient that is not asked for is not computed."""

    def loss(w, x):
        return jnp.sum(jnp.sin(x @ w))

    gradient = jax.grad(remat.checkpoint(loss), (0, 1))
    jaxpr = jax.make_jaxpr(lambda w, x: gradient(w, x)[0])(normal(3, 3), normal(2, 3))
    live, _ = pe.dce_jaxpr(jaxpr.jaxpr, [True])
    plain = jax.make_jaxpr(lambda w, x: jax.grad(loss)(w, x))(
        normal(3, 3), normal(2, 3)
    )
    assert str(live).count("dot_general[") == str(plain).count("dot_general[") == 2
