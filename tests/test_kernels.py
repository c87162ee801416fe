"""Kernels, library routines with derivative rules of their own, and random numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counted, equations, evaluations, runs
from jax import lax
from jax.experimental import pallas as pl
from problems import assert_close, compiled, normal

import remat
from remat import checkpoint_name, policies

# Attention as a kernel, as flash attention does it: the forward rule keeps the result
# and a normalizer for each row, and the backward rule recomputes the scores from those.
# The scores are capped by a tanh, which is what `counted` evaluates.

BLOCK, KEYS, WIDTH, ITERATIONS = 2, 4, 3, 3


def forward_kernel(q, k, v, out, normalizer):
    scores = counted(q[...] @ k[...].T, "forward")
    total = jax.nn.logsumexp(scores, axis=1)
    out[...] = jnp.exp(scores - total[:, None]) @ v[...]
    normalizer[...] = total


def backward_kernel(q, k, v, out, normalizer, ct, dq, dk, dv):
    scores = counted(q[...] @ k[...].T, "backward")
    weights = jnp.exp(scores - normalizer[...][:, None])
    dv[...] = weights.T @ ct[...]
    delta = jnp.sum(out[...] * ct[...], axis=1)
    dscores = weights * (ct[...] @ v[...].T - delta[:, None]) * (1.0 - scores**2)
    dq[...] = dscores @ k[...]
    dk[...] = dscores.T @ q[...]


def shape_of(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def attend(q, k, v):
    """The kernel, one block of queries after the other."""
    rows = pl.BlockSpec((BLOCK, WIDTH), lambda i: (i, 0))
    whole = pl.BlockSpec((KEYS, WIDTH), lambda i: (0, 0))
    return pl.pallas_call(
        forward_kernel,
        grid=(q.shape[0] // BLOCK,),
        in_specs=[rows, whole, whole],
        out_specs=[rows, pl.BlockSpec((BLOCK,), lambda i: (i,))],
        out_shape=[shape_of(*q.shape), shape_of(q.shape[0])],
        interpret=True,
    )(q, k, v)


@jax.custom_vjp
def flash(q, k, v):
    return attend(q, k, v)[0]


@jax.jit
def flash_forward(q, k, v):
    out, normalizer = attend(q, k, v)
    out = checkpoint_name(out, "out")
    normalizer = checkpoint_name(normalizer, "normalizer")
    return out, (q, k, v, out, normalizer)


def flash_backward(residuals, ct):
    shapes = [shape_of(*x.shape) for x in residuals[:3]]
    return tuple(
        pl.pallas_call(backward_kernel, out_shape=shapes, interpret=True)(
            *residuals, ct
        )
    )


flash.defvjp(flash_forward, flash_backward)


def plain_attention(q, k, v):
    return jax.nn.softmax(jnp.tanh(q @ k.T)) @ v


def layer(attention, w, x):
    return jnp.sin(attention(x @ w, jnp.cos(x), x)) + x


def plain(attention, w, x):
    return jnp.sum(jnp.sin(layer(attention, w, jnp.sin(x))))


def in_vmap(attention, w, x):
    return jnp.sum(
        jax.vmap(lambda w: layer(attention, w, jnp.sin(x)))(jnp.stack([w, 2.0 * w]))
    )


def in_cond(attention, w, x):
    return jnp.sum(
        lax.cond(x[0, 0] > -99, partial(layer, attention, w), jnp.sin, jnp.cos(x))
    )


def in_scan(attention, w, x):
    def step(x, scale):
        y = layer(attention, w * scale, x)
        return checkpoint_name(y, "carry"), None

    return jnp.sum(lax.scan(step, x, jnp.arange(1.0, ITERATIONS + 1))[0])


def in_checkpoint(attention, w, x):
    policy = policies.save_any_names_but_these()
    inner = remat.checkpoint(partial(layer, attention), policy=policy)
    return jnp.sum(jnp.sin(inner(w, jnp.sin(x))))


PLACES = {f.__name__: f for f in (plain, in_vmap, in_cond, in_scan, in_checkpoint)}
OPERANDS = normal(WIDTH, WIDTH), normal(KEYS, WIDTH)


@cache
def of_plain_attention(place):
    fun = partial(PLACES[place], plain_attention)
    return compiled(jax.value_and_grad(fun, (0, 1)))(*OPERANDS)


NAMES = policies.save_only_these_names
FLASH_POLICIES = {
    "none": (None, 2),
    "out": (NAMES("out"), 2),
    "both": (NAMES("out", "normalizer"), 1),
    "everything": (policies.everything_saveable, 1),
    "any": (policies.save_any_names_but_these(), 1),
    "pallas": (lambda prim, *avals, **params: prim.name == "pallas_call", 1),
}


@pytest.mark.parametrize(
    ("place", "policy"),
    [("plain", policy) for policy in FLASH_POLICIES]
    + [(place, p) for place in PLACES if place != "plain" for p in ("none", "both")],
)
def test_flash_attention(place, policy):
    """The forward kernel runs once if its results are saved, else twice."""
    policy, times = FLASH_POLICIES[policy]
    fun = remat.checkpoint(partial(PLACES[place], flash), policy=policy)
    gradient = jax.value_and_grad(fun, (0, 1))
    if place == "in_scan" and times == 2:
        times = 3  # once more for what is carried into the iterations
    kernels = evaluations(gradient, *OPERANDS, primitive="pallas_call")
    assert kernels == times + 1
    runs.clear()
    values = jax.block_until_ready(compiled(gradient)(*OPERANDS))
    assert_close(values, of_plain_attention(place), 1e-5)
    blocks = KEYS // BLOCK
    each = {"in_scan": ITERATIONS, "in_vmap": 2}.get(place, 1)
    assert runs == {"forward": blocks * times * each, "backward": each}


def test_flash_attention_with_saved_carries():
    fun = remat.checkpoint(partial(in_scan, flash), policy=NAMES("carry"))
    gradient = jax.value_and_grad(fun, (0, 1))
    assert evaluations(gradient, *OPERANDS, primitive="pallas_call") == 3


def test_batch_of_gradients_of_flash_attention():
    fun = remat.checkpoint(partial(plain, flash), policy=NAMES("out", "normalizer"))
    ws, x = normal(2, WIDTH, WIDTH), OPERANDS[1]
    actual = compiled(jax.vmap(jax.grad(fun), (0, None)))(ws, x)
    reference = jax.vmap(jax.grad(partial(plain, plain_attention)), (0, None))
    assert_close(actual, compiled(reference)(ws, x), 1e-5)


def test_kernel_without_a_rule_in_forward_mode():
    def double(x, out):
        out[...] = 2.0 * jnp.sin(x[...])

    def fun(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jnp.exp(pl.pallas_call(double, out_shape=shape, interpret=True)(x))

    x = normal(3)
    actual = compiled(lambda x: jax.jvp(remat.checkpoint(fun), (x,), (x,)))(x)
    assert_close(actual, compiled(lambda x: jax.jvp(fun, (x,), (x,)))(x), 1e-5)
    for f in (fun, remat.checkpoint(fun)):  # JAX has no reverse mode through kernels
        with pytest.raises(ValueError, match="reverse-mode"):
            jax.grad(lambda x, f=f: f(x).sum())(x)


# Library routines. A routine evaluates a primitive, which is counted.


@dataclass(frozen=True)
class Routine:
    """What a routine is called with, and what of it is counted.

    Attributes:
        fun: a function that uses the routine and names its results.
        args: its arguments.
        primitive: the primitive to count.
        enough: whether the derivative reads nothing of it but what is named.
        more: how many equations more there are with names saved than with nothing, over
            all branches: they are opened or left whole by how much is recomputed.
        twice: whether to differentiate it a second time; not where JAX can't, or where
            it takes seconds to compile.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    primitive: str
    enough: bool = False
    more: int = 0
    twice: bool = True


ROUTINES: dict[str, Routine] = {}


def routine(primitive: str, *args: Any, **known: Any) -> Any:
    def register(fun):
        ROUTINES[fun.__name__] = Routine(fun, args, primitive, **known)
        return fun

    return register


def named(x):
    return checkpoint_name(x, "named")


A, V, ROWS = normal(3, 3), normal(3), normal(4, 2)


def positive_definite(a):
    return a @ a.T + 3.0 * jnp.eye(3)


def positive(x):
    return jnp.exp(x) + 0.5


@routine("dot_general", *(normal(1, 4, 2, 3, seed=i) for i in range(3)))
def dot_product_attention(q, k, v):
    return named(jax.nn.dot_product_attention(q, k, v, is_causal=True))


@routine(
    "dot_general",
    normal(1, 4, 4, 2),
    normal(1, 4, 2, 2),
    normal(1, 1, 4, 4),
    twice=False,
)
def grouped_attention(q, k, bias):
    return named(jax.nn.dot_product_attention(q, k, jnp.sin(k), bias))


@routine("cholesky", A, V)
def cholesky(a, b):
    factor = named(lax.linalg.cholesky(positive_definite(a)))
    return jax.scipy.linalg.cho_solve((factor, True), b)


@routine("eigh", A, enough=True)
def eigh(a):
    return named(lax.linalg.eigh(positive_definite(a)))


@routine("svd", A, enough=True)
def svd(a):
    return named(lax.linalg.svd(a, full_matrices=False))


@routine("qr", A, enough=True)
def qr(a):
    return named(lax.linalg.qr(a, full_matrices=False))


@routine("lu", A)
def lu(a):
    return named(lax.linalg.lu(positive_definite(a)))[0]


@routine("triangular_solve", A, normal(3, 2), enough=True)
def triangular_solve(a, b):
    lower = jnp.tril(a) + 3.0 * jnp.eye(3)
    return named(lax.linalg.triangular_solve(lower, b, left_side=True, lower=True))


@routine("tridiagonal_solve", V, normal(3, 2), enough=True)
def tridiagonal_solve(a, b):
    lower, upper = jnp.array([0.0, 1.0, 1.0]) * a, jnp.array([1.0, 1.0, 0.0]) * a
    return named(lax.linalg.tridiagonal_solve(lower, a + 4.0, upper, b))


@routine("lu", A, V)
def solve(a, b):
    return named(jnp.linalg.solve(positive_definite(a), b))


@routine("lu", A)
def determinant(a):
    return named(jnp.linalg.slogdet(positive_definite(a))[1])


@routine("svd", A)
def pseudoinverse(a):
    return named(jnp.linalg.pinv(positive_definite(a)))


@routine("dot_general", A)
def matrix_power(a):
    return named(jnp.linalg.matrix_power(a, 3))


@routine("dot_general", A, twice=False, more=6)
def expm(a):
    return named(jax.scipy.linalg.expm(a / 4.0, max_squarings=2))


@routine("lgamma", V, enough=True, twice=False)
def gamma_functions(x):
    x = positive(x)
    return named((jax.scipy.special.gammaln(x), jax.scipy.special.digamma(x)))


@routine("erf_inv", V, enough=True)
def error_functions(x):
    special = jax.scipy.special
    return named(special.erfinv(jnp.tanh(x))), special.log_ndtr(x)


@routine("regularized_incomplete_beta", V, enough=True, twice=False)
def betainc(x):
    a = jnp.float32(1.5)
    return named(jax.scipy.special.betainc(a, a, jax.nn.sigmoid(x)))


@routine("bessel_i1e", V)
def bessel_functions(x):
    special = jax.scipy.special
    return named(special.i1e(x)), special.i0(x)


@routine("igamma", V, twice=False)
def gammainc(x):
    return named(jax.scipy.special.gammainc(positive(x), positive(x + 1.0)))


@routine("log", V)
def entropies(x):
    special = jax.scipy.special
    x = positive(x)
    return named((special.xlogy(x, x), special.entr(x), special.rel_entr(x, x + 1.0)))


@routine("exp", A)
def log_sums(x):
    return named((jax.scipy.special.logsumexp(x, axis=0), lax.cumlogsumexp(x)))


@routine("fft", A, enough=True)
def fft(x):
    return jnp.abs(named(jnp.fft.fft(x)))


@routine("fft", ROWS)
def real_fft(x):
    return named(jnp.fft.irfft(jnp.fft.rfft(x, axis=0) ** 2, axis=0))


@routine("sort", A)
def sort(x):
    index = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    keys, values, index = named(lax.sort((jnp.sin(x), jnp.cos(x), index), num_keys=1))
    return keys * values, index


@routine("sort", A, enough=True)
def argsort(x):
    return jnp.take_along_axis(jnp.sin(x), named(jnp.argsort(jnp.cos(x))), 1)


@routine("top_k", A)
def top_k(x):
    return named(lax.top_k(jnp.sin(x), 2)[0])


@routine("gather", A, enough=True)
def gather(x):
    return named(jnp.sin(x)[jnp.array([0, 2, 2])])


@routine("scatter-add", A, enough=True)
def scatter_add(x):
    index = jnp.array([0, 2, 2])
    return named(jnp.sin(x).at[index].add(jnp.cos(x)))


@routine("scatter-max", A, enough=True)
def scatter_max(x):
    index = jnp.array([0, 2, 2])
    return named(jnp.sin(x).at[index].max(jnp.cos(x)))


@routine("scatter", A)
def scatter(x):
    return named(jnp.sin(x).at[jnp.array([0, 2])].set(jnp.cos(x[:2])))


@routine("reduce_window_max", normal(4, 4), enough=True)
def max_pool(x):
    return named(
        lax.reduce_window(jnp.sin(x), -jnp.inf, lax.max, (2, 2), (1, 1), "VALID")
    )


@routine("reduce_window_sum", normal(4, 4), enough=True)
def sum_pool(x):
    return named(lax.reduce_window(jnp.sin(x), 0.0, lax.add, (2, 2), (2, 2), "VALID"))


@routine("conv_general_dilated", normal(1, 2, 6, 6), normal(4, 1, 2, 2), enough=True)
def convolution(x, kernel):
    y = lax.conv_general_dilated(
        jnp.sin(x),
        kernel,
        (2, 1),
        "SAME",
        rhs_dilation=(1, 2),
        feature_group_count=2,
    )
    return named(y)


@routine("conv_general_dilated", normal(1, 4, 2), normal(2, 2, 3), enough=True)
def transposed_convolution(x, kernel):
    return named(lax.conv_transpose(jnp.sin(x), kernel, (2,), "SAME"))


@routine("random_gamma", V[:1], enough=True, twice=False)
def random_gamma(x):
    return named(jax.random.gamma(jax.random.key(1), positive(x)))


def routine_loss(name):
    def loss(*args):
        outs = ROUTINES[name].fun(*(jnp.sin(x) for x in args))
        total = jnp.zeros(())
        for y in jax.tree.leaves(outs):
            if jnp.issubdtype(y.dtype, jnp.floating):
                total = total + jnp.sum(jnp.sin(y))
        return total

    return loss


@pytest.mark.parametrize("name", ROUTINES)
def test_evaluations_of_routines(name):
    args, primitive = ROUTINES[name].args, ROUTINES[name].primitive

    def count(fun):
        gradient = jax.value_and_grad(fun, tuple(range(len(args))))
        return evaluations(gradient, *args, primitive=primitive)

    loss = routine_loss(name)
    undecorated = count(loss)
    assert undecorated > 0
    nothing = count(remat.checkpoint(loss))
    by_name = count(remat.checkpoint(loss, policy=NAMES("named")))
    everything = count(remat.checkpoint(loss, policy=policies.everything_saveable))
    assert undecorated < nothing <= 2 * undecorated
    assert undecorated <= by_name <= nothing + ROUTINES[name].more
    assert everything == undecorated
    if ROUTINES[name].enough:
        assert by_name == undecorated


@pytest.mark.parametrize("name", ROUTINES)
def test_derivatives_of_routines(name):
    """Values, gradients and a second derivative, all of a batch."""
    known, args = ROUTINES[name], ROUTINES[name].args

    def derivatives(fun):
        gradient = jax.value_and_grad(fun, tuple(range(len(args))))
        if not known.twice:
            return compiled(gradient)(*args)
        second = jax.vmap(lambda *args: jax.jvp(gradient, args, args))
        return compiled(second)(*(jnp.stack([x, 0.9 * x]) for x in args))

    policy = None if len(name) % 2 else NAMES("named")
    loss = routine_loss(name)
    actual = derivatives(remat.checkpoint(loss, policy=policy))
    assert_close(actual, derivatives(loss), 1e-3)


# Random numbers: the same in the recomputation as in the forward pass.

DRAWS = {
    "bernoulli": lambda key, x: jax.random.bernoulli(key, 0.5, x.shape),
    "normal": lambda key, x: jax.random.normal(key, x.shape) > 0,
    "permutation": lambda key, x: jax.random.permutation(key, x.size) % 2 == 0,
    "categorical": lambda key, x: (
        jax.random.categorical(key, jnp.zeros(2), shape=x.shape) == 1
    ),
}


def dropout(key, x, draw="bernoulli"):
    return jnp.where(DRAWS[draw](key, x), 2.0 * x, 0.0)


def dropout_once(key, x, draw):
    return dropout(key, jnp.exp(x), draw)


def dropout_with_key_inside(key, x, draw):
    impl = jax.random.key_impl(key)
    return dropout(jax.random.key(5, impl=impl), jnp.exp(x), draw)


def dropout_in_scan(key, x, draw):
    """A new key in each iteration, split off from the one that is carried."""

    def step(carry, _):
        key, x = carry
        key, subkey = jax.random.split(key)
        y = dropout(subkey, jnp.exp(x), draw)
        return (key, jnp.sin(x)), y

    return lax.scan(step, (key, x), None, length=ITERATIONS)[1]


def dropout_in_cond(key, x, draw):
    return lax.cond(
        x[0] > -99, lambda k, x: dropout(k, jnp.exp(x), draw), lambda _, x: x, key, x
    )


def dropout_in_checkpoint(key, x, draw):
    return remat.checkpoint(partial(dropout, draw=draw))(key, jnp.exp(x))


DROPOUTS = {
    f.__name__: f
    for f in (
        dropout_once,
        dropout_with_key_inside,
        dropout_in_scan,
        dropout_in_cond,
        dropout_in_checkpoint,
    )
}
IMPLEMENTATIONS = ["threefry2x32", "rbg", "unsafe_rbg"]
CASES = [(place, "threefry2x32", "bernoulli") for place in DROPOUTS]
CASES += [(place, "rbg", "bernoulli") for place in ("dropout_once", "dropout_in_scan")]
CASES += [("dropout_in_scan", "unsafe_rbg", "bernoulli")]
CASES += [("dropout_once", "threefry2x32", draw) for draw in DRAWS]


@pytest.mark.parametrize(("place", "impl", "draw"), dict.fromkeys(CASES))
def test_dropout_drops_the_same_backward(place, impl, draw):
    """The derivative of what is dropped is zero, of what is kept it is not."""
    key, x = jax.random.key(3, impl=impl), jnp.linspace(0.1, 0.9, 32)
    scale = jnp.ones((ITERATIONS, 32)) if place == "dropout_in_scan" else jnp.ones(32)

    def fun(key, x, scale):
        # The derivative in `scale` reads y in squares, which recomputes the draw.
        y = DROPOUTS[place](key, x, draw)
        return jnp.sum((y * scale) ** 2) / 2.0, y

    def gradients(fun):
        return jax.jit(jax.value_and_grad(fun, (1, 2), has_aux=True))(key, x, scale)

    (_, y), (dx, dscale) = gradients(remat.checkpoint(fun))
    kept = np.asarray(y) != 0
    assert 0 < kept.mean() < 1
    np.testing.assert_array_equal(np.asarray(dscale) != 0, kept)
    np.testing.assert_allclose(dscale, y**2, rtol=1e-5)
    if place != "dropout_in_scan":
        np.testing.assert_array_equal(np.asarray(dx) != 0, kept)
    assert_close(((_, y), (dx, dscale)), gradients(fun), 1e-5)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_draws_are_repeated_rather_than_saved(impl):
    def fun(key, x):
        return jnp.sum(jnp.sin(dropout_once(key, x, "bernoulli")))

    def names(policy):
        gradient = jax.grad(remat.checkpoint(fun, policy=policy), 1)
        jaxpr = jax.make_jaxpr(gradient)(jax.random.key(3, impl=impl), normal(4))
        return [eqn.primitive.name for eqn in equations(jaxpr)]

    assert names(None).count("random_bits") == 2
    assert names(policies.everything_saveable).count("random_bits") == 1


def test_raw_keys():
    key, x = jax.random.PRNGKey(3), jnp.ones(32)
    fun = remat.checkpoint(dropout)
    (y, pullback) = jax.jit(partial(jax.vjp, fun))(key, x)
    np.testing.assert_array_equal(pullback(jnp.ones(32))[1], y)
