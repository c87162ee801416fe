"""Functions to differentiate, for the tests of every composition of transformations.

A problem maker takes a transformation (`remat.checkpoint` with some policy, or one that
does nothing) and returns a function that uses it and the function's arguments. Makers
register themselves with `@problem`.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat
from remat import checkpoint_name, policies

Function = Callable[..., Any]
Transformation = Callable[[Function], Function]
Maker = Callable[[Transformation], tuple[Function, tuple[Any, ...]]]


@dataclass(frozen=True)
class Problem:
    """A maker with what is known of it.

    Attributes:
        make: the maker.
        tolerance: largest error, relative to the largest value of an output.
        forward: whether it has a forward-mode derivative.
        reverse: whether it has a reverse-mode derivative.
        twice: whether it can be differentiated a second time.
        batched: whether it can be batched.
        thorough: whether every composition takes it. Where all that is special are
            rules that belong to JAX, values and reverse mode are enough.
    """

    make: Maker
    tolerance: float = 1e-5
    forward: bool = True
    reverse: bool = True
    twice: bool = True
    batched: bool = True
    thorough: bool = True


PROBLEMS: dict[str, Problem] = {}


def problem(**known: Any) -> Callable[[Maker], Maker]:
    def register(make: Maker) -> Maker:
        PROBLEMS[make.__name__] = Problem(make, **known)
        return make

    return register


def unchanged(fun: Function) -> Function:
    return fun


POLICIES: dict[str, Any] = {
    "none": None,
    "everything": policies.everything_saveable,
    "nothing": policies.nothing_saveable,
    "dots": policies.dots_saveable,
    "dots_no_batch": policies.dots_with_no_batch_dims_saveable,
    "any_but": policies.save_any_names_but_these("a", "unused"),
    "names_or_dots": policies.save_from_both_policies(
        policies.save_any_names_but_these("b"), policies.dots_saveable
    ),
    "cheap": lambda prim, *avals, **params: prim.name not in ("sin", "dot_general"),
}


def checkpoint_with(policy: str) -> Transformation:
    return partial(remat.checkpoint, policy=POLICIES[policy])


class Pure(NamedTuple):
    """A problem as a function of a list of its differentiable arguments."""

    fun: Function
    args: list[Any]


def pure(name: str, transformation: Transformation = unchanged) -> Pure:
    """The differentiable results of a problem by its differentiable arguments."""
    fun, args = PROBLEMS[name].make(transformation)
    leaves, tree = jax.tree.flatten(args)
    is_active = [differentiable(x) for x in leaves]

    def of_active(active: Sequence[Any]) -> list[Any]:
        values = iter(active)
        merged = [
            next(values) if a else x for a, x in zip(is_active, leaves, strict=True)
        ]
        outs = fun(*jax.tree.unflatten(tree, merged))
        return [y for y in jax.tree.leaves(outs) if differentiable(y)]

    return Pure(of_active, [x for x, a in zip(leaves, is_active, strict=True) if a])


def differentiable(x: Any) -> bool:
    return jax.typeof(x).to_tangent_aval().dtype != jax.dtypes.float0


def directions(tree: Any, seed: int = 0) -> Any:
    """Arbitrary values of the same structure, shapes and dtypes: (co)tangents."""

    def direction(x: Any) -> jax.Array:
        aval = jax.typeof(x)
        label = f"{seed} {aval.shape} {aval.dtype}"
        rng = np.random.default_rng(zlib.crc32(label.encode()))
        values = rng.normal(size=aval.shape)
        if jnp.issubdtype(aval.dtype, jnp.complexfloating):
            values = values + 1j * rng.normal(size=aval.shape)
        # Weak types are kept: an argument of weak type has such a tangent.
        if getattr(aval, "weak_type", False):
            return jax.lax.full_like(jnp.asarray(x), float(values.sum()))
        return jnp.asarray(values, aval.dtype)

    return jax.tree.map(direction, tree)


def scalar_loss(name: str, transformation: Transformation = unchanged) -> Pure:
    """One real number made of all results of a problem, not linear in any of them."""
    fun, args = pure(name, transformation)

    def loss(active: Sequence[Any]) -> jax.Array:
        total = jnp.zeros(())
        for i, y in enumerate(fun(active)):
            weights = directions(y, seed=i)
            term = jnp.real(jnp.vdot(weights, y)).astype(jnp.float32)
            total = total + jnp.sin(term)
        return total

    return Pure(loss, args)


def assert_close(actual: Any, expected: Any, tolerance: float) -> None:
    """The same structure, dtypes and weak types, and values within a tolerance."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert jnp.shape(a) == jnp.shape(e)
        assert jax.typeof(a).dtype == jax.typeof(e).dtype
        if jnp.issubdtype(jax.typeof(e).dtype, jax.dtypes.prng_key):
            a, e = jax.random.key_data(a), jax.random.key_data(e)
        if jax.typeof(e).dtype == jax.dtypes.float0:
            continue
        assert jax.typeof(a).weak_type == jax.typeof(e).weak_type
        kind = np.complex128 if jnp.iscomplexobj(e) else np.float64
        a, e = np.asarray(a).astype(kind), np.asarray(e).astype(kind)
        scale = max(1.0, np.max(np.abs(e), initial=0.0))
        np.testing.assert_allclose(a, e, rtol=0, atol=tolerance * scale)


# Those in which a policy looks into programs.
OPENED = [
    "mlp",
    "scan",
    "scan_of_many_carries",
    "short_scans",
    "nested_scans",
    "scan_in_cond_in_scan",
    "names_in_branches",
    "nested_checkpoint",
    "nested_checkpoint_in_scan",
]


def some_policies(
    names: Iterable[str] | None = None, offset: int = 0, half: int | None = None
) -> list[Any]:
    """Pairs of a problem and a policy, the policies taken in turn.

    Every pair means a compilation, so no composition takes them all, and those that
    have much in common take one half (0 or 1) of the problems each, apart from those in
    which a policy looks into programs.
    """
    policies = list(POLICIES)
    pairs = [
        (name, policies[(i + offset) % len(policies)])
        for i, name in enumerate(PROBLEMS)
        if names is None or name in names
        if half is None or name in OPENED or i % 2 == half
    ]
    return [pytest.param(*pair, id="-".join(pair)) for pair in pairs]


def compiled(fun: Function) -> Function:
    """`jax.jit`, without the slow part of compilation: results are all that counts."""
    options = {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    }
    return jax.jit(fun, compiler_options=options)


# Networks.


def normal(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    rng = np.random.default_rng(zlib.crc32(f"{seed} {shape}".encode()))
    return jnp.asarray(rng.normal(size=shape), dtype)


@problem()
def mlp(checkpoint):
    @checkpoint
    def network(params, x):
        for i, layer in enumerate(params):
            x = jnp.tanh(jnp.sin(x @ layer["w"] + layer["b"]))
            x = checkpoint_name(x, "ab"[i % 2])
        return x

    params = [{"w": normal(4, 4, seed=i), "b": normal(4, seed=i)} for i in range(3)]
    return network, (params, normal(5, 4))


@problem()
def attention(checkpoint):
    @checkpoint
    def attend(w, x):
        q, k, v = (checkpoint_name(x @ w[i], "a") for i in range(3))
        scores = jnp.einsum("btd,bsd->bts", q, k) / jnp.float32(2.0)
        mask = jnp.tril(jnp.ones((3, 3), bool))
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
        return checkpoint_name(jnp.einsum("bts,bsd->btd", weights, v), "b")

    return attend, (normal(3, 4, 4), normal(2, 3, 4))


@problem(thorough=False)
def layer_norm(checkpoint):
    @checkpoint
    def normalized(x, scale):
        mean = x.mean(-1, keepdims=True)
        variance = jnp.var(x, axis=-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(variance + 1e-3) * scale

    return normalized, (normal(3, 4), normal(4))


@problem(thorough=False)
def convolution(checkpoint):
    @checkpoint
    def convolved(x, kernel):
        y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME")
        return jnp.sin(checkpoint_name(y, "a"))

    return convolved, (normal(2, 2, 4, 4), normal(3, 2, 3, 3))


@problem(tolerance=1e-4, thorough=False)
def pooling(checkpoint):
    @checkpoint
    def pooled(x):
        window, strides = (1, 2, 2), (1, 2, 2)
        largest = jax.lax.reduce_window(
            jnp.sin(x), -jnp.inf, jax.lax.max, window, strides, "VALID"
        )
        total = jax.lax.reduce_window(
            jnp.exp(x), 0.0, jax.lax.add, window, strides, "VALID"
        )
        return largest * total

    return pooled, (normal(2, 4, 4),)


@problem()
def dropout(checkpoint):
    @checkpoint
    def dropped(key, x, w):
        y = checkpoint_name(jnp.tanh(x @ w), "a")
        keep = jax.random.bernoulli(key, 0.5, y.shape)
        noise = jax.random.normal(jax.random.fold_in(key, 1), y.shape)
        return jnp.where(keep, y / 0.5, 0.0) + jnp.sin(y) * noise

    return dropped, (jax.random.key(3), normal(4, 3), normal(3, 3))


# Structures of arguments and results.


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "steps"],
    meta_fields=["label"],
)
@dataclass
class Layer:
    weight: Any
    steps: Any
    label: str


@problem()
def pytrees(checkpoint):
    @checkpoint
    def of_trees(layer, pair, table):
        first, (second, none) = pair
        assert none is None
        assert layer.label == "dense"
        y = jnp.sin(first @ layer.weight) * table["scale"] + second
        return {
            "layer": Layer(y, layer.steps + 1, "out"),
            "list": [jnp.cos(y), (), None],
            "table": table,
        }

    layer = Layer(normal(3, 3), jnp.int32(4), "dense")
    pair = (normal(2, 3), [normal(3, seed=2), None])
    return of_trees, (layer, pair, {"scale": jnp.float32(0.5), "empty": {}})


@problem()
def keyword_arguments(checkpoint):
    @checkpoint
    def scaled(x, /, y=None, *rest, scale, shift=1.0, **others):
        assert y is None
        assert not rest
        return jnp.sin(x * scale + shift) * others["extra"]["w"]

    def called(x, scale, w):
        return scaled(x, shift=0.5, scale=scale, extra={"w": w})

    return called, (normal(3), normal(3, seed=1), normal(3, seed=2))


@problem()
def integers_and_bools(checkpoint):
    @checkpoint
    def chosen(x, index, mask, count):
        y = jnp.where(mask, jnp.sin(x[index]), x[index])
        return y * count.astype(y.dtype), index + count, ~mask, jnp.argmax(y)

    index = jnp.array([0, 2, 2], jnp.int32)
    mask = jnp.array([True, False, True])
    return chosen, (normal(4), index, mask, jnp.int32(3))


@problem()
def key_arguments(checkpoint):
    @checkpoint
    def noisy(keys, x):
        first, second = jax.random.split(keys[1])
        y = jnp.sin(x) * jax.random.uniform(first, x.shape)
        return y, second, jnp.exp(y)

    return noisy, (jax.random.split(jax.random.key(1), 2), normal(3))


@problem()
def weak_types(checkpoint):
    @checkpoint
    def promoted(scale, x):
        y = jnp.sin(scale) * 2.0
        return y, x * y, jnp.exp(x) + 1, scale

    return promoted, (0.5, normal(3))


@problem()
def plain_results(checkpoint):
    """Results that are arguments, repeated, constant or cut off from the arguments."""

    @checkpoint
    def results(x, y):
        z = jnp.sin(x)
        cut = jax.lax.stop_gradient(jnp.exp(y))
        return x, z, z, y, x, jnp.ones(2), cut, z * cut, None, (), 3

    return results, (normal(3), normal(3, seed=1))


@problem()
def linear_function(checkpoint):
    @checkpoint
    def product(w, x):
        return jnp.fft.irfft(jnp.fft.rfft(x @ w)), -x

    return product, (normal(4, 4), normal(2, 4))


@problem()
def empty_arrays(checkpoint):
    @checkpoint
    def of_empty(x, y):
        return jnp.sin(x) @ y, jnp.exp(x).sum(), jnp.cos(y)

    return of_empty, (normal(2, 0), normal(0, 3))


@problem(tolerance=2e-5)
def complex_numbers(checkpoint):
    @checkpoint
    def of_complex(z, x):
        w = jnp.exp(z * jax.lax.complex(x, jnp.cos(x))) @ z
        return jnp.abs(w) ** 2, jnp.sin(w), jnp.real(z) * x

    z = jax.lax.complex(normal(3, 3), normal(3, 3, seed=1))
    return of_complex, (z, normal(3, 3, seed=2))


@problem(tolerance=4e-2)
def bfloat16(checkpoint):
    @checkpoint
    def network(w, x):
        y = checkpoint_name(jnp.tanh(x @ w), "a")
        return jnp.sin(y @ w).astype(jnp.float32), y

    args = normal(4, 4, dtype=jnp.bfloat16), normal(2, 4, dtype=jnp.bfloat16)
    return network, args


@problem(tolerance=1e-2, thorough=False)
def float16(checkpoint):
    @checkpoint
    def network(w, x):
        return jnp.tanh(jnp.sin(x.astype(jnp.float16) @ w)).sum()

    return network, (normal(4, 4, dtype=jnp.float16), normal(2, 4))


# Closures.


@problem()
def closed_over_arrays(checkpoint):
    w, constant = normal(3, 3), np.arange(3, dtype=np.float32)

    @checkpoint
    def layer(x):
        return jnp.sin(jnp.sin(x @ w) * constant)

    return layer, (normal(2, 3),)


@problem()
def closed_over_tracers(checkpoint):
    def network(w, x):
        hidden = jnp.sin(w)

        @checkpoint
        def layer(x):
            return jnp.tanh(jnp.sin(x @ hidden) @ w)

        return layer(layer(x))

    return network, (normal(3, 3), normal(2, 3))


# Rules of their own.


@problem(thorough=False)
def custom_jvps(checkpoint):
    @checkpoint
    def activated(x):
        y = jax.nn.silu(jax.nn.relu(x) + jax.nn.softplus(x) + jax.nn.relu6(x))
        return jax.nn.gelu(y) * jax.nn.logsumexp(x)

    return activated, (normal(3, 4),)


@jax.custom_jvp
def doubled_sine(x, y):
    return jnp.sin(x) * y


@doubled_sine.defjvp
def doubled_sine_jvp(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    # Twice the derivative in x, so that a rule that is passed over shows.
    return doubled_sine(x, y), 2.0 * jnp.cos(x) * y * dx + jnp.sin(x) * dy


@problem()
def wrong_custom_jvp(checkpoint):
    @checkpoint
    def of_rule(x, y):
        return jnp.exp(doubled_sine(x, jnp.sin(y)))

    return of_rule, (normal(3), normal(3, seed=1))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def tree_rule(power, x, tree):
    return jnp.sin(x) * tree["w"] ** power


def tree_rule_fwd(power, x, tree):
    y = checkpoint_name(jnp.sin(x), "a")
    residuals = {"cos": jnp.cos(x), "tree": (tree, y), "none": None}
    return y * tree["w"] ** power, residuals


def tree_rule_bwd(power, residuals, ct):
    tree, y = residuals["tree"]
    dw = power * ct * y * tree["w"] ** (power - 1)
    return 3.0 * ct * residuals["cos"] * tree["w"] ** power, {"w": dw, "n": None}


tree_rule.defvjp(tree_rule_fwd, tree_rule_bwd)


@problem(forward=False)
def custom_vjp(checkpoint):
    @checkpoint
    def of_rule(x, w, n):
        y: Any = tree_rule(3, jnp.sin(x), {"w": w, "n": n})
        return jnp.exp(y) * n.astype(y.dtype)

    return of_rule, (normal(3), normal(3, seed=1), jnp.int32(2))


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -0.5, 0.5),))


@problem(forward=False)
def custom_vjp_in_scan(checkpoint):
    @checkpoint
    def steps(x, ws):
        def step(carry, w):
            y = clipped(jnp.sin(carry * w))
            return checkpoint_name(y, "a"), y**2

        return jax.lax.scan(step, x, ws)

    return steps, (normal(3), normal(4, 3))


@jax.custom_vjp
def symbolic_rule(x, y):
    return jnp.sin(x) * y


def symbolic_rule_fwd(x, y):
    return jnp.sin(x.value) * y.value, (x.value, y.value, x.perturbed, y.perturbed)


def symbolic_rule_bwd(residuals, ct):
    x, y, of_x, of_y = residuals
    assert (of_x, of_y) == (True, False)
    return 2.0 * ct * jnp.cos(x) * y, ct * jnp.sin(x)


symbolic_rule.defvjp(symbolic_rule_fwd, symbolic_rule_bwd, symbolic_zeros=True)


@problem(forward=False)
def symbolic_zeros(checkpoint):
    """The rule is told which arguments are differentiated."""

    @checkpoint
    def of_rule(x):
        return symbolic_rule(jnp.exp(x), jnp.ones(3))

    return of_rule, (normal(3),)


@jax.custom_vjp
def optimized_rule(x):
    return jnp.sin(x)


optimized_rule.defvjp(
    lambda x: (jnp.sin(x), jnp.cos(x)),
    lambda cos, ct: (2.0 * ct * cos,),
    optimize_remat=True,
)


@problem(forward=False, twice=False)
def optimize_remat(checkpoint):
    @checkpoint
    def of_rule(x):
        return optimized_rule(jnp.exp(x)) * optimized_rule(x)

    return of_rule, (normal(3),)


@problem(forward=False)
def rules_not_asked_for(checkpoint):
    """Functions with rules that are not differentiated, named inside."""

    @jax.custom_vjp
    def backward_rule(x):
        return checkpoint_name(jnp.sin(x), "a")

    backward_rule.defvjp(
        lambda x: (checkpoint_name(jnp.sin(x), "a"), x), lambda x, ct: (3.0 * ct * x,)
    )

    @jax.custom_jvp
    def forward_rule(x):
        return checkpoint_name(jnp.cos(x), "b"), jnp.sin(x)

    forward_rule.defjvp(lambda x, t: (forward_rule(*x), (3.0 * t[0], t[0])))

    @checkpoint
    def of_rules(n, w):
        x = jnp.exp(n.astype(w.dtype) / 3.0)
        y = jnp.sin(backward_rule(x) * backward_rule(w))
        b, c = forward_rule(x)
        return jnp.sin(y * b) * jnp.sin(w * c)

    return of_rules, (jnp.arange(3), normal(3))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def applied(fun, x):
    return fun(x)


@applied.defjvp
def applied_jvp(fun, primals, tangents):
    (x,), (t,) = primals, tangents
    return fun(x), 2.0 * t * fun(x)


@problem()
def function_in_custom_jvp(checkpoint):
    @checkpoint
    def of_rule(x):
        return applied(lambda y: jnp.sin(y) * 3.0, jnp.exp(x)) * x

    return of_rule, (normal(3),)


@problem(tolerance=1e-4)
def custom_root(checkpoint):
    def newton(f, x):
        return jax.lax.fori_loop(0, 20, lambda _, x: x - f(x) / (3.0 * x**2), x)

    @checkpoint
    def cube_root(x):
        x = jnp.exp(x)
        return jax.lax.custom_root(
            lambda y: y**3 - x,
            jnp.ones(3),
            newton,
            lambda g, y: y / g(jnp.ones(3)),
        )

    return cube_root, (normal(3),)


@problem(twice=False, batched=False)
def linear_call(checkpoint):
    """A linear map with a transpose of its own."""

    @checkpoint
    def of_linear(scale, x):
        def forward(residuals, y):
            return residuals * y

        def transpose(residuals, ct):
            return 2.0 * residuals * ct

        y = jax.custom_derivatives.linear_call(
            forward, transpose, jax.lax.stop_gradient(jnp.exp(scale)), jnp.sin(x)
        )
        return jnp.sin(y)

    return of_linear, (normal(3), normal(3, seed=1))


# Control flow.


@problem()
def scan(checkpoint):
    @checkpoint
    def steps(w, x, xs):
        def step(carry, inputs):
            count, carry = carry
            carry = checkpoint_name(jnp.tanh(jnp.sin(carry @ w)) + inputs, "a")
            return (count + 1, carry), (carry.sum(), count)

        return jax.lax.scan(step, (jnp.int32(0), x), xs, reverse=True)

    return steps, (normal(3, 3), normal(3), normal(4, 3))


@problem()
def cond(checkpoint):
    @checkpoint
    def either(flag, index, x, w):
        y = jax.lax.cond(flag, lambda v: jnp.sin(v * w), lambda v: v.sum() * w, x)
        branches = [jnp.cos, lambda v: v, lambda v: jnp.exp(v) * w]
        return jax.lax.switch(index, branches, jnp.sin(y))

    return either, (jnp.bool_(True), jnp.int32(2), normal(3), normal(3, seed=1))


@problem()
def fori_loop(checkpoint):
    @checkpoint
    def powers(w, x):
        def body(i, y):
            return jnp.sin(y @ w) + i.astype(y.dtype)

        return jax.lax.fori_loop(0, 3, body, jnp.exp(x))

    return powers, (normal(3, 3), normal(3))


@problem(reverse=False)
def while_loop(checkpoint):
    @checkpoint
    def doubled(x, limit):
        def below(carry):
            return carry[0] < limit

        def body(carry):
            n, y = carry
            return n + 1, jnp.sin(y) * 1.5

        return jax.lax.while_loop(below, body, (jnp.int32(0), jnp.exp(x)))

    return doubled, (normal(3), jnp.int32(3))


@problem()
def integer_while_loop(checkpoint):
    """A loop without tangents, between values that have some."""

    @checkpoint
    def counted(x, n):
        log2 = jax.lax.while_loop(
            lambda c: c[1] > 1, lambda c: (c[0] + 1, c[1] // 2), (jnp.int32(0), n)
        )[0]
        return jnp.sin(jnp.sin(x) * log2.astype(x.dtype)), log2

    return counted, (normal(3), jnp.int32(9))


@problem()
def scan_of_many_carries(checkpoint):
    """Carries that swap, count, stay as they are, or are made of another's past."""

    @checkpoint
    def steps(w, x, y, xs):
        def step(carry, inputs):
            i, x, y, fixed, last = carry
            a = checkpoint_name(jnp.sin(x @ w) * fixed, "a")
            b = checkpoint_name(jnp.tanh(a) + inputs * jnp.cos(last), "b")
            return (i + 2, y, b, fixed, x), (i, inputs, a * b, x)

        start = (jnp.int32(1), x, y, x.sum(), jnp.zeros_like(x))
        return jax.lax.scan(step, start, xs, unroll=2)

    return steps, (normal(3, 3), normal(3), normal(3, seed=1), normal(5, 3))


@problem()
def short_scans(checkpoint):
    """Loops of no iteration and of one."""

    @checkpoint
    def steps(w, x):
        def step(carry, inputs):
            y = checkpoint_name(jnp.sin(carry * inputs + w), "a")
            return jnp.sin(y), y

        none = jax.lax.scan(step, x, jnp.zeros((0, 3)))
        one = jax.lax.scan(step, none[0], jnp.sin(x)[None], reverse=True)
        return none, one, jax.lax.scan(lambda c, _: (jnp.cos(c), None), x, length=1)

    return steps, (normal(3), normal(3, seed=1))


@problem()
def nested_scans(checkpoint):
    @checkpoint
    def steps(ws, x):
        def outer(x, w):
            def inner(y, row):
                y = checkpoint_name(jnp.tanh(y * row + x), "a")
                return y, checkpoint_name(jnp.sin(y), "b")

            y, zs = jax.lax.scan(inner, jnp.cos(x), w, reverse=True)
            return checkpoint_name(y + jnp.sin(x), "c"), zs.sum(0)

        return jax.lax.scan(outer, x, ws)

    return steps, (normal(2, 3, 3), normal(3))


@problem()
def scan_in_cond_in_scan(checkpoint):
    @checkpoint
    def steps(ws, x):
        def looped(x, w):
            def step(y, row):
                y = checkpoint_name(jnp.sin(y @ w), "a")
                return y + row, None

            return jax.lax.scan(step, x, w)[0]

        def step(carry, inputs):
            i, w = inputs
            y = jax.lax.cond(
                i % 2 == 0, looped, lambda x, w: jnp.cos(x) * w[0], carry, w
            )
            return checkpoint_name(jnp.sin(y), "b"), y.sum()

        return jax.lax.scan(step, x, (jnp.arange(3), ws))

    return steps, (normal(3, 3, 3), normal(3))


@problem()
def names_in_branches(checkpoint):
    """Branches that save different numbers of values, of several types."""

    @checkpoint
    def chosen(indices, x, w):
        def long(x):
            y = checkpoint_name(jnp.sin(x @ w), "a")
            z = checkpoint_name(jnp.cos(y).sum(), "b")
            return jnp.tanh(jnp.exp(jnp.sin(y)) * z), z

        def short(x):
            y = checkpoint_name(jnp.cos(jnp.cos(x)), "a")
            return jnp.sin(y), jnp.sin(y).sum()

        def noisy(x):
            key = jax.random.fold_in(jax.random.key(3), 1)
            return x * jax.random.normal(key, x.shape), jnp.zeros(())

        branches = [long, short, noisy, lambda x: (x, x[0])]
        total = jnp.zeros(())
        for i in range(3):
            x, z = jax.lax.switch(indices[i], branches, x)
            total = total + jnp.sin(z)
        return x, total

    return chosen, (jnp.array([1, 0, 2]), normal(3), normal(3, 3))


@problem()
def nested_checkpoint_in_scan(checkpoint):
    """The body has a policy of its own, and there is more than it in the iteration."""

    @checkpoint
    def steps(ws, x):
        @partial(remat.checkpoint, policy=policies.save_only_these_names("a"))
        def layer(x, w):
            return jnp.sin(checkpoint_name(jnp.tanh(x @ w), "a"))

        def step(x, w):
            y = layer(jnp.cos(x), w)
            return y + checkpoint_name(jnp.sin(x), "b"), layer(y, w).sum()

        return jax.lax.scan(step, x, ws)

    return steps, (normal(3, 3, 3), normal(3))


@problem()
def inside_scan(checkpoint):
    def steps(w, x):
        @checkpoint
        def step(carry, w):
            y = jnp.tanh(jnp.sin(checkpoint_name(carry @ w, "a")))
            return y, checkpoint_name(y, "b").sum()

        return jax.lax.scan(step, x, w)

    return steps, (normal(3, 2, 2), normal(2))


@problem()
def inside_cond(checkpoint):
    def either(flag, x, w):
        inside = checkpoint(lambda x: jnp.sin(jnp.sin(x) @ w))
        return jax.lax.cond(flag, inside, jnp.cos, x)

    return either, (jnp.bool_(True), normal(3), normal(3, 3))


@problem()
def mapped(checkpoint):
    @checkpoint
    def of_rows(x, w):
        return jax.lax.map(lambda row: jnp.sin(jnp.sin(row) @ w), x)

    return of_rows, (normal(3, 2), normal(2, 2))


# Linear algebra, indices and reductions.


@problem(tolerance=1e-4, thorough=False)
def linear_algebra(checkpoint):
    @checkpoint
    def solved(a, b):
        spd = a @ a.T + 3.0 * jnp.eye(3)
        factor = jnp.linalg.cholesky(spd)
        y = jax.scipy.linalg.solve_triangular(factor, b, lower=True)
        return jnp.linalg.solve(spd, jnp.sin(b)) + y, jnp.linalg.slogdet(spd)[1]

    return solved, (normal(3, 3), normal(3, seed=1))


@problem(thorough=False)
def indexing(checkpoint):
    @checkpoint
    def indexed(x, index):
        y = jnp.sin(x)[index]
        z = (
            x.at[index]
            .multiply(y, unique_indices=True)
            .at[0]
            .set(y[1])
            .at[index]
            .max(jnp.cos(y))
        )
        window = jax.lax.dynamic_slice(z, (index[0],), (2,))
        z = jax.lax.dynamic_update_slice(z, jnp.exp(window), (index[1],))
        return jnp.sort(z), jnp.argsort(z), jax.lax.top_k(jnp.sin(z), 2)

    return indexed, (normal(5), jnp.array([1, 3], jnp.int32))


@problem(tolerance=1e-4, thorough=False)
def cumulative(checkpoint):
    @checkpoint
    def of_rows(x):
        y = jnp.cumsum(jnp.sin(x), axis=0) * jnp.cumprod(x, axis=1)
        z = jax.lax.associative_scan(jnp.multiply, jnp.cos(x))
        return y.max(0), y.prod(1), jax.nn.logsumexp(z, axis=0), jnp.median(x)

    return of_rows, (normal(3, 3),)


@problem(tolerance=1e-3, thorough=False)
def conjugate_gradients(checkpoint):
    matrix = 3.0 * jnp.eye(3) + 0.1

    @checkpoint
    def solved(x):
        scale = jnp.exp(x.sum())
        return jax.scipy.sparse.linalg.cg(lambda v: matrix @ v * scale, jnp.sin(x))[0]

    return solved, (normal(3) / 3.0,)


# Nesting.


@problem()
def nested_jit(checkpoint):
    @partial(jax.jit, static_argnums=1)
    def inner(x, n):
        return jnp.sin(x) ** n

    @checkpoint
    def outer(x, w):
        y = inner(jax.jit(jnp.matmul)(x, w), 2)
        return inner(y, 2) + jax.jit(lambda v: v * w.sum())(y)

    return outer, (normal(2, 3), normal(3, 3))


@problem()
def nested_jax_checkpoint(checkpoint):
    policy = jax.checkpoint_policies.save_only_these_names("a")

    @partial(jax.checkpoint, policy=policy)
    def inner(w, x):
        return jnp.sin(checkpoint_name(jnp.sin(x @ w), "a"))

    @checkpoint
    def outer(w, x):
        return inner(w, jnp.exp(inner(w, x)))

    return outer, (normal(3, 3), normal(2, 3))


@problem()
def nested_checkpoint(checkpoint):
    inner_policy = policies.save_only_these_names("b")

    @partial(remat.checkpoint, policy=inner_policy)
    def inner(w, x):
        y = checkpoint_name(jnp.sin(x @ w), "a")
        return checkpoint_name(jnp.sin(y), "b")

    @checkpoint
    def outer(w, x):
        return inner(w, jnp.exp(inner(w, x)))

    return outer, (normal(3, 3), normal(2, 3))


@problem()
def twice_checkpoint(checkpoint):
    @checkpoint
    @partial(remat.checkpoint, policy=policies.dots_saveable)
    @remat.checkpoint
    def network(w, x):
        return jnp.tanh(jnp.sin(x @ w) @ w)

    return network, (normal(3, 3), normal(2, 3))


@problem()
def chain(checkpoint):
    first = checkpoint(lambda w, x: jnp.sin(jnp.sin(x @ w)))
    second = checkpoint(lambda w, x: jnp.cos(jnp.sin(x) @ w))
    return lambda w, x: second(w, first(w, x)), (normal(3, 3), normal(2, 3))


@problem()
def halving(checkpoint):
    def halve(functions):
        if len(functions) == 1:
            return functions[0]
        middle = len(functions) // 2
        first, second = halve(functions[:middle]), halve(functions[middle:])
        return lambda x: second(checkpoint(first)(x))

    def whole(w, x):
        layers = [lambda x, i=i: jnp.sin(x @ w[i]) for i in range(4)]
        return halve(layers)(x)

    return whole, (normal(4, 2, 2), normal(2))


@problem(twice=False)
def inner_grad(checkpoint):
    @checkpoint
    def gradient(x, w):
        def energy(x):
            return jnp.sum(jnp.sin(checkpoint_name(jnp.sin(x) @ w, "a")))

        return jax.grad(energy)(x), jax.vmap(jax.jacfwd(energy))(jnp.ones((2, 3)) * x)

    return gradient, (normal(3), normal(3, 3))


@problem()
def inner_vmap(checkpoint):
    @checkpoint
    def rows(x, w):
        return jax.vmap(lambda row, v: jnp.sin(jnp.sin(row) @ v), (0, None))(x, w)

    return rows, (normal(4, 3), normal(3, 2))


@problem()
def debug_print(checkpoint):
    @checkpoint
    def printed(x):
        y = jnp.sin(x)
        jax.debug.print("y = {}", y[0])
        return jnp.exp(y)

    return printed, (normal(3),)


@problem(twice=False)
def shard_map(checkpoint):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "i")
    spec, everywhere = jax.sharding.PartitionSpec("i"), jax.sharding.PartitionSpec()

    @checkpoint
    def outer(x, w):
        @partial(jax.shard_map, mesh=mesh, in_specs=(spec, everywhere), out_specs=spec)
        def inner(x, w):
            return jnp.sin(jnp.sin(x @ w) * jax.lax.psum(x.sum(), "i"))

        return inner(x, w)

    return outer, (normal(4, 3), normal(3, 3))


@problem(twice=False)
def inside_shard_map(checkpoint):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "i")
    spec, everywhere = jax.sharding.PartitionSpec("i"), jax.sharding.PartitionSpec()

    @partial(jax.shard_map, mesh=mesh, in_specs=(spec, everywhere), out_specs=spec)
    def outer(x, w):
        @checkpoint
        def inner(x, w):
            return jnp.sin(jnp.sin(x @ w) * jax.lax.psum(x.sum(), "i"))

        return inner(x, w)

    return outer, (normal(4, 3), normal(3, 3))
