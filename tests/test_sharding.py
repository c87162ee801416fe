"""Programs over several devices: values, derivatives, what is recomputed, and where.

The mesh is two-dimensional, so that a value may be split over one axis and the same
along the other.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import equations
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import remat

SHAPE, NAMES = (4, 2), ("x", "y")
AUTO = jax.make_mesh(SHAPE, NAMES, axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh(SHAPE, NAMES, axis_types=(AxisType.Explicit,) * 2)

# LLVM's optimizations take most of the time, and change no result by much.
QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
POLICIES = {
    "nothing": None,
    "named": remat.policies.save_any_names_but_these(),
    "products": remat.policies.dots_saveable,
    "everything": remat.policies.everything_saveable,
}


@dataclass(frozen=True)
class Problem:
    """A function of an activation and a weight, and the mesh that it runs under."""

    fun: Callable[[Any, Any], Any]
    mesh: Any = None
    # Where each argument lies; None: on one device.
    specs: tuple[Any, Any] | None = None

    def __call__(self, x: Any, w: Any) -> Any:
        return self.fun(x, w)

    def arguments(self) -> tuple[Any, Any]:
        x = jnp.sin(jnp.arange(64.0).reshape(8, 8))
        w = jnp.cos(jnp.arange(64.0).reshape(8, 8)) / 4
        if self.specs is None:
            return x, w
        mesh = self.mesh or AUTO
        to = [NamedSharding(mesh, spec) for spec in self.specs]
        return jax.device_put(x, to[0]), jax.device_put(w, to[1])

    def context(self) -> Any:
        return nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)


def over(mesh: Any, body: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`body` on blocks of rows of x, and the whole of w."""
    options = {"in_specs": (P("x"), P()), "out_specs": P("x"), **options}
    return jax.shard_map(body, mesh=mesh, **options)


def named(x: Any, name: str) -> Any:
    return remat.checkpoint_name(x, name)


def summed(x: Any, w: Any) -> Any:
    h = named(jnp.tanh(x @ w), "hidden")
    return jnp.sin(h) * named(lax.psum(jnp.sin(h), "x"), "sum")


def gathered(x: Any, w: Any) -> Any:
    h = jnp.tanh(x @ w)
    whole = named(lax.all_gather(h, "x", axis=0, tiled=True), "whole")
    return jnp.sin(x @ jnp.sin(whole.T @ whole))


def shifted(x: Any, w: Any) -> Any:
    ring = [(i, (i + 1) % 4) for i in range(4)]
    y = jnp.tanh(lax.ppermute(jnp.tanh(x @ w), "x", ring))
    return jnp.sin(named(lax.ppermute(y, "x", ring), "shifted")) * x


def scattered(x: Any, w: Any) -> Any:
    part = jnp.tanh(x.T @ x) @ w
    part = lax.psum_scatter(part, "x", scatter_dimension=0, tiled=True)
    return jnp.sin(named(part, "part")) * jnp.cos(x)


def exchanged(x: Any, w: Any) -> Any:
    columns = lax.all_to_all(jnp.tanh(x @ w), "x", 1, 0, tiled=True)
    return lax.all_to_all(jnp.sin(named(columns, "columns")), "x", 0, 1, tiled=True)


def averaged(x: Any, w: Any) -> Any:
    """A loss: a scalar inside, the same on all devices."""
    scale = jnp.sum(jnp.sin(x @ w) ** 2)
    return lax.pmean(named(scale, "scale") * jnp.cos(scale), ("x", "y"))


def in_a_loop(x: Any, w: Any) -> Any:
    ring = [(i, (i + 1) % 4) for i in range(4)]

    def turn(carry, _):
        h = jnp.tanh(carry @ w)
        return lax.ppermute(named(h, "turn"), "x", ring), jnp.sum(h)

    y, sums = lax.scan(turn, x, None, length=3)
    return y * jnp.sum(sums)


def by_axis_index(x: Any, w: Any) -> Any:
    i = lax.axis_index("x").astype(x.dtype)
    return jnp.sin(x @ w * (i + 1)) * named(jnp.tanh(x), "hidden")


def several(x: Any, w: Any) -> tuple[Any, ...]:
    """Results that are operands, not split, saved, or the same as each other."""
    h = named(jnp.tanh(x @ w), "hidden")
    return gathered(x, w), x, h, h, lax.psum(jnp.sum(h), "x")


def with_a_checkpoint(x: Any, w: Any) -> Any:
    return jnp.sin(remat.checkpoint(gathered)(jnp.tanh(x @ w), w))


@jax.custom_vjp
def ruled(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


def ruled_forward(x: Any, w: Any) -> Any:
    y = named(ruled(x, w), "hidden")  # only here, not in the function
    return y, (x, w, y)


def ruled_backward(residuals: Any, ct: Any) -> Any:
    x, w, y = residuals
    ct = ct * (jnp.ones_like(y) - y * y)
    return ct @ w.T, lax.psum(x.T @ ct, "x")


ruled.defvjp(ruled_forward, ruled_backward)


COLLECTIVES = {
    "psum": summed,
    "all_gather": gathered,
    "ppermute": shifted,
    "reduce_scatter": scattered,
    "all_to_all": exchanged,
    "scan_of_ppermute": in_a_loop,
    "axis_index": by_axis_index,
}


def between(inner: Callable[..., Any]) -> Callable[..., Any]:
    """`inner` with something to differentiate on either side."""
    return lambda x, w: jnp.sin(inner(jnp.tanh(x), w)) * x


def constrained(x: Any, w: Any) -> Any:
    def split(y: Any, *spec: Any) -> Any:
        return lax.with_sharding_constraint(y, NamedSharding(AUTO, P(*spec)))

    h = split(named(jnp.tanh(x @ w), "hidden"), "x", "y")
    return split(jnp.sin(h @ w), "x", None) * h


def jitted(x: Any, w: Any) -> Any:
    rows, all_of_it = NamedSharding(AUTO, P("x")), NamedSharding(AUTO, P())

    @partial(jax.jit, in_shardings=(rows, all_of_it), out_shardings=rows)
    def inner(x, w):
        return named(jnp.tanh(jnp.sin(x @ w)), "hidden") * x

    return jnp.sin(inner(x, w))


def explicit(x: Any, w: Any) -> Any:
    """The types of values say how they are split, here of products and a reshard."""
    h = named(jnp.tanh(jnp.dot(x, w, out_sharding=P("x", "y"))), "hidden")
    rows = jax.sharding.reshard(h, P("x", None))
    return jnp.sin(jnp.dot(rows, jnp.sin(w), out_sharding=P("x", None))) * rows


def manual_inside_explicit(x: Any, w: Any) -> Any:
    h = jnp.dot(x, w, out_sharding=P("x", None))
    w = jax.sharding.reshard(w, P())
    return jnp.sin(over(EXPLICIT, gathered)(jnp.tanh(h), w))


def several_joined(x: Any, w: Any) -> Any:
    specs = (*[P("x")] * 4, P())
    return sum(jnp.sin(y) for y in over(AUTO, several, out_specs=specs)(x, w))


def nested_manual(x: Any, w: Any) -> Any:
    """A mesh axis at a time. (With `check_vma` JAX can't differentiate this itself.)"""

    def inner(x: Any, w: Any) -> Any:
        return lax.psum(named(jnp.tanh(x @ w), "hidden"), "y")

    def outer(x: Any, w: Any) -> Any:
        columns = {"in_specs": (P(None, "y"), P("y")), "out_specs": P()}
        h = over(None, inner, axis_names={"y"}, check_vma=False, **columns)(x, w)
        return jnp.sin(lax.all_gather(h, "x", tiled=True)[:2]) * x

    # Outside of `jit` JAX does not take it.
    return jax.jit(over(AUTO, outer, axis_names={"x"}, check_vma=False))(x, w)


ROWS = (P("x"), P())
PROBLEMS = {
    **{
        f"{name}{'' if check else '_unchecked'}": Problem(
            between(over(AUTO, body, check_vma=check))
        )
        for name, body in COLLECTIVES.items()
        for check in (True, False)
        if check or name in ("psum", "all_gather", "ppermute", "reduce_scatter")
    },
    **{
        f"loss{'' if check else '_unchecked'}": Problem(
            over(
                AUTO,
                averaged,
                in_specs=(P("x", "y"), P("y")),
                out_specs=P(),
                check_vma=check,
            )
        )
        for check in (True, False)
    },
    "partly_manual": Problem(
        between(over(None, gathered, axis_names={"x"})), mesh=AUTO, specs=ROWS
    ),
    "several_results": Problem(several_joined),
    "with_a_checkpoint": Problem(between(over(AUTO, with_a_checkpoint))),
    "custom_vjp": Problem(between(over(AUTO, ruled))),
    "nested": Problem(nested_manual),
    "constraint": Problem(constrained, specs=(P(), P(None, "y"))),
    "jit_with_shardings": Problem(jitted, specs=ROWS),
    "explicit": Problem(explicit, mesh=EXPLICIT, specs=(P("x", None), P(None, "y"))),
    "manual_inside_explicit": Problem(
        manual_inside_explicit,
        mesh=EXPLICIT,
        specs=(P("x", None), P()),
    ),
}
# One of each kind, and fewer still, where all would take too long.
KINDS = [
    "all_gather",
    "psum_unchecked",
    "loss",
    "partly_manual",
    "constraint",
    "jit_with_shardings",
    "explicit",
]
FEW = ["reduce_scatter", "all_gather_unchecked", "manual_inside_explicit"]


@contextmanager
def problem(name: str) -> Iterator[tuple[Problem, Any, Any]]:
    """The problem of this name and its arguments, under its mesh."""
    found = PROBLEMS[name]
    with found.context():
        yield (found, *found.arguments())


def like(tree: Any, phase: float) -> Any:
    """Tangents or cotangents: none of them zero or equal, split like `tree`."""

    def one(x: Any) -> Any:
        flat = np.cos(np.arange(x.size, dtype=x.dtype) + phase)
        value = jnp.asarray(flat.reshape(x.shape))
        on_a_mesh = isinstance(x.sharding, NamedSharding)
        return jax.device_put(value, x.sharding) if on_a_mesh else value

    return jax.tree.map(one, tree)


def first_order(f: Any, x: Any, w: Any) -> Any:
    """Value, forward and reverse mode, and the linear map by itself."""
    y, forward = jax.jvp(f, (x, w), like((x, w), 1))
    _, pullback = jax.vjp(f, x, w)
    _, linear = jax.linearize(f, x, w)
    return y, forward, pullback(like(y, 2)), linear(*like((x, w), 3))


def second_order(f: Any, x: Any, w: Any) -> Any:
    """Forward over reverse, and reverse over reverse."""

    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(jnp.sin(f(x, w)))

    gradient = jax.grad(loss, (0, 1))

    def norm(x: Any, w: Any) -> Any:
        return sum(jnp.sum(g**2) for g in gradient(x, w))

    # Not through `like`: under `jit` the arguments have no place.
    tangents = (jnp.cos(x), jnp.sin(w))
    return jax.jvp(gradient, (x, w), tangents), jax.grad(norm, (0, 1))(x, w)


def batched(f: Any, x: Any, w: Any) -> Any:
    """A batch of values, and of gradients."""
    xs = jnp.stack([x, jnp.cos(x), jnp.sin(x)])
    gradient = jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), (0, 1))
    return jax.vmap(f, (0, None))(xs, w), jax.vmap(gradient, (0, None))(xs, w)


def vjp(f: Any, x: Any, w: Any) -> Any:
    y, pullback = jax.vjp(f, x, w)
    return y, pullback(jnp.cos(y))


def run(fun: Callable[..., Any], *args: Any) -> Any:
    return jax.jit(fun).lower(*args).compile(QUICKLY)(*args)


@cache
def expected(derivative: Callable[..., Any], name: str) -> Any:
    """What `derivative` is of the undecorated function."""
    with problem(name) as (f, x, w):
        return run(partial(derivative, f.fun), x, w)


def assert_close(found: Any, expected: Any) -> None:
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, found, expected)


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_are_those_of_the_function(name: str) -> None:
    with problem(name) as (f, x, w):
        g = remat.checkpoint(f.fun, policy=POLICIES["named"])
        assert_close(run(partial(vjp, g), x, w), expected(vjp, name))


@pytest.mark.parametrize("policy", ["nothing", "products", "everything"])
@pytest.mark.parametrize("name", FEW)
def test_gradients_are_right_under_other_policies(name: str, policy: str) -> None:
    with problem(name) as (f, x, w):
        g = remat.checkpoint(f.fun, policy=POLICIES[policy])
        assert_close(run(partial(vjp, g), x, w), expected(vjp, name))


@pytest.mark.parametrize("name", ["psum_unchecked", "loss", "explicit"])
def test_derivatives_are_right_outside_of_jit(name: str) -> None:
    with problem(name) as (f, x, w):
        g = remat.checkpoint(f.fun, policy=POLICIES["named"])
        assert_close(first_order(g, x, w), first_order(jax.jit(f.fun), x, w))


@pytest.mark.parametrize("name", KINDS)
def test_second_derivatives_are_those_of_the_function(name: str) -> None:
    with problem(name) as (f, x, w):
        g = remat.checkpoint(f.fun, policy=POLICIES["named"])
        found = run(partial(second_order, g), x, w)
        assert_close(found, expected(second_order, name))


@pytest.mark.parametrize("name", FEW)
def test_batches_are_those_of_the_function(name: str) -> None:
    with problem(name) as (f, x, w):
        g = remat.checkpoint(f.fun, policy=POLICIES["named"])
        assert_close(run(partial(batched, g), x, w), expected(batched, name))


# What is recomputed.

gathered_between = between(over(AUTO, gathered))


def collectives(fun: Callable[..., Any], *args: Any) -> tuple[int, int]:
    """How often a product of rows is gathered: in the jaxpr, and when compiled."""
    found = Counter(e.primitive.name for e in equations(jax.make_jaxpr(fun)(*args)))
    text = jax.jit(fun).lower(*args).compile(QUICKLY).as_text()
    assert text is not None
    return found["all_gather"], text.count(" all-gather(")


def whole_loss(x: Any, w: Any) -> Any:
    return lax.pmean(jnp.sum(gathered(x, w)), "x")


SAVE_WHOLE = remat.policies.save_only_these_names("whole")
GATHERS = {
    # All of the function is inside, or a part of it whose result is needed as well.
    "all": lambda decorate, check: decorate(
        over(AUTO, whole_loss, out_specs=P(), check_vma=check)
    ),
    "part": lambda decorate, check: decorate(
        lambda x, w: jnp.sum(between(over(AUTO, gathered, check_vma=check))(x, w))
    ),
    "jitted_part": lambda decorate, check: decorate(
        lambda x, w: jnp.sum(
            between(over(AUTO, jax.jit(gathered), check_vma=check))(x, w)
        )
    ),
    # The checkpoint is inside.
    "around": lambda decorate, check: (
        lambda x, w: jnp.sum(
            between(over(AUTO, decorate(gathered), check_vma=check))(x, w)
        )
    ),
    "nested": lambda decorate, check: decorate(
        lambda x, w: jnp.sum(over(AUTO, decorate(gathered), check_vma=check)(x, w))
    ),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("where", GATHERS)
def test_an_all_gather_saved_by_name_is_not_repeated(where: str, check: bool) -> None:
    decorate = partial(remat.checkpoint, policy=SAVE_WHOLE)
    x, w = PROBLEMS["all_gather"].arguments()
    fun = GATHERS[where](decorate, check)
    assert collectives(jax.value_and_grad(fun), x, w) == (1, 1)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("where", ["all", "part", "around"])
def test_an_all_gather_that_is_not_saved_is_repeated_once(
    where: str, check: bool
) -> None:
    x, w = PROBLEMS["all_gather"].arguments()
    fun = GATHERS[where](remat.checkpoint, check)
    assert collectives(jax.value_and_grad(fun), x, w) == (2, 2)


def test_a_scalar_in_a_body_can_be_saved() -> None:
    # As a residual it gets an axis, in which those of the devices lie side by side.
    def body(x: Any, w: Any) -> Any:
        largest = named(jnp.max(lax.all_gather(jnp.tanh(x @ w), "x")), "largest")
        return jnp.sin(x * largest) * jnp.cos(largest)

    x, w = PROBLEMS["psum"].arguments()
    policy = remat.policies.save_only_these_names("largest")
    f = between(over(AUTO, body))
    g = remat.checkpoint(f, policy=policy)
    assert_close(run(partial(vjp, g), x, w), run(partial(vjp, f), x, w))
    assert (4,) in [r.shape for r in residuals(g, x, w)]


def test_a_name_inside_a_body_is_known() -> None:
    # A warning would be an error here.
    x, w = PROBLEMS["all_gather"].arguments()
    f = remat.checkpoint(over(AUTO, gathered), policy=SAVE_WHOLE)
    assert jax.jit(lambda x: jax.vjp(f, x, w)[0])(x).shape == x.shape


def test_without_prevent_cse_nothing_is_kept_apart_in_a_body() -> None:
    x, w = PROBLEMS["all_gather"].arguments()

    def barriers(prevent_cse: bool) -> int:
        f = remat.checkpoint(
            GATHERS["all"](lambda f: f, True),
            policy=SAVE_WHOLE,
            prevent_cse=prevent_cse,
        )
        text = jax.jit(jax.grad(f)).lower(x, w).as_text()
        return text.count("optimization_barrier")

    assert barriers(True) > 0
    assert barriers(False) == 0


def test_a_print_in_a_body_happens_once(capfd: pytest.CaptureFixture[str]) -> None:
    def body(x: Any, w: Any) -> Any:
        jax.debug.print("printed")
        return gathered(x, w)

    x, w = PROBLEMS["all_gather"].arguments()
    f = between(over(AUTO, body))
    g = remat.checkpoint(f, policy=SAVE_WHOLE)
    assert_close(run(partial(vjp, g), x, w), run(partial(vjp, gathered_between), x, w))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("printed") == jax.device_count()


def test_reports_tell_what_is_saved_in_a_body() -> None:
    x, w = PROBLEMS["all_gather"].arguments()
    f = remat.checkpoint(between(over(AUTO, gathered)), policy=SAVE_WHOLE)
    assert [r.name for r in remat.saved_residuals(f, x, w)] == ["x", "w", "whole"]


# Where the residuals are.


@dataclass(frozen=True)
class Residual:
    shape: tuple[int, ...]
    # Of the part on one device.
    shard: tuple[int, ...]


def residuals(fun: Callable[..., Any], *args: Any) -> list[Residual]:
    """What the compiled forward pass of `fun` returns for its backward pass."""
    forward = jax.jit(lambda *args: jax.vjp(fun, *args)[1]).lower(*args)
    places = jax.tree.leaves(forward.compile(QUICKLY).output_shardings)
    shapes = [out.shape for out in jax.tree.leaves(forward.out_info)]
    return [
        Residual(shape, place.shard_shape(shape))
        for shape, place in zip(shapes, places, strict=True)
    ]


WHOLE, BY_ROWS = Residual((8, 8), (8, 8)), Residual((8, 8), (2, 8))
BLOCKS = Residual((8, 8), (2, 4))


@pytest.mark.parametrize(
    ("name", "policy", "expected"),
    [
        ("constraint", "nothing", {WHOLE, Residual((8, 8), (8, 4))}),
        ("jit_with_shardings", "nothing", {BY_ROWS, WHOLE}),
        ("explicit", "nothing", {BY_ROWS, Residual((8, 8), (8, 4))}),
        ("explicit", "named", {BY_ROWS, BLOCKS, Residual((8, 8), (8, 4))}),
        # Each of the four groups of devices has gathered all of it.
        (
            "manual_inside_explicit",
            "named",
            {BY_ROWS, WHOLE, Residual((32, 8), (8, 8))},
        ),
        ("partly_manual", "named", {BY_ROWS, WHOLE, Residual((32, 8), (8, 8))}),
    ],
)
def test_residuals_are_split_like_the_values(
    name: str, policy: str, expected: set[Residual]
) -> None:
    with problem(name) as (f, x, w):
        g = remat.checkpoint(f.fun, policy=POLICIES[policy])
        assert set(residuals(g, x, w)) == expected


@pytest.mark.parametrize("name", KINDS)
def test_residuals_are_split_as_without_a_checkpoint(name: str) -> None:
    with problem(name) as (f, x, w):
        g = remat.checkpoint(f.fun, policy=POLICIES["everything"])
        found, expected = residuals(g, x, w), residuals(f.fun, x, w)
    whole = {r.shape for r in expected if r.shard == r.shape}
    assert all(r.shard != r.shape or r.shape in whole for r in found)
    assert {r for r in found if r.shard != r.shape} <= {*expected}


# What it costs.


def deep(x: Any, ws: Any) -> Any:
    for w in ws:
        h = x
        for _ in range(3):
            h = jnp.tanh(h @ w)
        x = named(x + h, "block")
    return x


def deep_loss(x: Any, ws: Any) -> Any:
    return lax.pmean(jnp.mean(deep(x, ws) ** 2), "x")


@dataclass(frozen=True)
class Cost:
    temp_bytes: int
    flops: float


def cost(loss: Callable[..., Any]) -> Cost:
    x = jax.ShapeDtypeStruct((1024, 64), jnp.float32)
    ws = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 8
    lowered = jax.jit(jax.value_and_grad(loss, 1)).lower(x, ws)
    compiled = lowered.compile(QUICKLY)
    memory, work = compiled.memory_analysis(), compiled.cost_analysis()
    assert memory is not None
    assert work is not None
    return Cost(memory.temp_size_in_bytes, work["flops"])


@pytest.mark.parametrize(
    ("inside", "check"), [("the loss", True), ("the blocks", False)]
)
def test_the_peak_falls_inside_a_body(inside: str, check: bool) -> None:
    loss = over(AUTO, deep_loss, out_specs=P(), check_vma=check)
    if inside == "the blocks":
        blocks = over(AUTO, deep, check_vma=check)

        def loss(x: Any, ws: Any) -> Any:
            return jnp.mean(blocks(x, ws) ** 2)

    policy = remat.policies.save_only_these_names("block")
    plain = cost(loss)
    theirs = cost(jax.checkpoint(loss, policy=policy))
    ours = cost(remat.checkpoint(loss, policy=policy))
    assert ours.temp_bytes < 0.5 * plain.temp_bytes
    assert ours.temp_bytes < 0.5 * theirs.temp_bytes
    assert ours.flops <= 1.001 * theirs.flops
