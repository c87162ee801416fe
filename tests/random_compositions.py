"""Random compositions of transformations of random programs.

A transformation takes a function of a tuple of floats and a tuple of others, which
gives a flat list of arrays, with arguments for it, and makes another of that kind.
"""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from problems import differentiable, directions
from random_programs import CHECKPOINTS, NAMESPACE, Writer

import remat

Args = tuple[tuple[Any, ...], tuple[Any, ...]]
Function = Callable[..., list[Any]]


@dataclass(frozen=True)
class Step:
    """A transformation of a function.

    Attributes:
        name: which one.
        wrt: which of the floats are differentiated.
        stride: which of the results are: the first, and every `stride`-th from it.
        axes: for each argument, where it is batched.
        policy: the source of a checkpoint.
    """

    name: str
    wrt: tuple[int, ...] = ()
    stride: int = 1
    axes: tuple[int | None, ...] = ()
    policy: str = ""

    def __repr__(self) -> str:
        details = [f"{self.wrt}", f"outs[::{self.stride}]"] if self.wrt else []
        details += [str(x) for x in (self.axes, self.policy) if x]
        return f"{self.name}({', '.join(details)})"


FORWARD = ("jvp", "linearize", "jacfwd")
REVERSE = ("vjp", "grad", "jacrev", "hessian_vector")
ORDERS = {"hessian_vector": 2, "jit": 0, "vmap": 0, "scan": 0, "checkpoint": 0}


@st.composite
def compositions(draw, derivatives: str) -> tuple[Step, ...]:
    """One to three transformations, the innermost first, at most two derivatives."""
    steps: list[Step] = []
    order = 0
    for _ in range(draw(st.integers(1, 3))):
        possible = [*(REVERSE if derivatives != "forward" else ())]
        possible += FORWARD if derivatives != "reverse" else ()
        possible = [n for n in possible if order + ORDERS.get(n, 1) <= 2]
        if steps:
            possible += ["jit", "vmap", "vmap", "scan", "checkpoint"]
        elif draw(st.integers(0, 2)) == 2:
            possible = ["vmap", "checkpoint", "jit"]
        name = draw(st.sampled_from(possible))
        order += ORDERS.get(name, 1)
        steps.append(draw(steps_named(name)))
        if derivatives == "reverse" and steps[-1].wrt == (0, 1, 2):
            derivatives = "all"  # the rules for reverse mode are used up
    if order == 0:  # nothing is saved without a derivative
        name = "jvp" if derivatives == "forward" else "grad"
        steps.append(draw(steps_named(name)))
    return tuple(steps)


@st.composite
def steps_named(draw, name: str) -> Step:
    match name:
        case "vmap":
            axis = st.sampled_from([0, None, -1])
            axes = draw(st.tuples(*[axis] * 3, *[st.sampled_from([0, None])] * 2))
            return Step(name, axes=(0, *axes[1:]) if not any_batched(axes) else axes)
        case "checkpoint":
            return Step(name, policy=draw(CHECKPOINTS))
        case "jit" | "scan":
            return Step(name)
    subsets = [(0, 1, 2), (0,), (1,), (2,), (0, 2), (1, 2)]
    if name in ("jacfwd", "jacrev"):
        subsets = [(1,), (0,), (2,)]
    wrt, stride = st.sampled_from(subsets), st.sampled_from([1, 1, 2, 3])
    return Step(name, wrt=draw(wrt), stride=draw(stride))


def any_batched(axes: Sequence[int | None]) -> bool:
    return any(axis is not None for axis in axes)


def transformed(
    step: Step, fun: Function, args: Args, namespace: dict[str, Any]
) -> tuple[Function, Args]:
    match step.name:
        case "jit":
            return jax.jit(fun), args
        case "checkpoint":
            return eval(step.policy, namespace)(fun), args
        case "vmap":
            axes = step.axes[:3], step.axes[3:]
            batched = jax.tree.map(batch, args, axes, is_leaf=lambda x: x is None)
            return jax.vmap(fun, in_axes=axes), batched
        case "scan":
            floats = jax.tree.map(lambda x: batch(x, 0), args[0])

            def scanned(floats, others):
                return jax.lax.map(lambda xs: fun(xs, others), floats)

            return scanned, (floats, args[1])
    return derivative(step, fun), args


def batch(x: Any, axis: int | None) -> Any:
    if axis is None:
        return x
    if x.dtype == bool:
        return jnp.stack([x, ~x], axis)
    return jnp.stack([x, (x + 1) % 3 if x.dtype == jnp.int32 else 0.7 * x], axis)


def derivative(step: Step, fun: Function) -> Function:
    def derived(floats, others):
        active = [floats[i] for i in step.wrt]

        def of_active(active):
            given = list(floats)
            for i, x in zip(step.wrt, active, strict=True):
                given[i] = x
            outs = [y for y in fun(tuple(given), others) if differentiable(y)]
            return outs[:: step.stride]

        def scalar(active):
            return sum(
                jnp.sin(jnp.vdot(directions(y, seed=i), y))
                for i, y in enumerate(of_active(active))
            )

        tangents = directions(active, seed=1)
        match step.name:
            case "jvp":
                result = jax.jvp(of_active, (active,), (tangents,))
            case "linearize":
                outs, linear = jax.linearize(of_active, active)
                result = outs, linear(tangents), linear(active)
            case "vjp":
                outs, pullback = jax.vjp(of_active, active)
                result = outs, pullback(directions(outs, seed=2))
            case "grad":
                result = jax.grad(scalar)(active)
            case "hessian_vector":
                result = jax.jvp(jax.grad(scalar), (active,), (tangents,))
            case "jacfwd":
                result = jax.jacfwd(of_active)(active)
            case "jacrev":
                result = jax.jacrev(of_active)(active)
            case _:
                raise AssertionError(step)
        return jax.tree.leaves(result)

    return derived


def arguments() -> Args:
    floats = (
        jnp.float32(0.4),
        jnp.array([0.3, -0.8, 0.5], jnp.float32),
        jnp.array([[0.2, -0.4, 0.9], [0.7, 0.1, -0.6], [-0.3, 0.8, 0.35]], jnp.float32),
    )
    return floats, (jnp.int32(1), jnp.bool_(True))


@dataclass(frozen=True)
class Example:
    """A program, what is done to it, and whether the result is jitted."""

    source: str
    steps: tuple[Step, ...]
    eager: bool

    def __repr__(self) -> str:
        how = "eager" if self.eager else "jit"
        source = textwrap.indent(self.source, "    ")
        return f"\n{source}\n    f -> {' -> '.join(map(str, self.steps))} -> {how}\n"

    def function(self, checkpoints: dict[str, Any]) -> tuple[Function, Args]:
        """The composition, with these functions for the checkpoints."""
        namespace = {**NAMESPACE, **checkpoints}
        exec(compile(self.source, "<random program>", "exec"), namespace)
        program: Any = namespace["f"]

        def fun(floats, others):
            return list(program(*floats, *others))

        args = arguments()
        for step in self.steps:
            fun, args = transformed(step, fun, args, namespace)
        return fun, args

    def decorated(self) -> tuple[Function, Args]:
        return self.function(
            {"checkpoint": remat.checkpoint, "jax_checkpoint": jax_checkpoint}
        )

    def undecorated(self) -> tuple[Function, Args]:
        return self.function({"checkpoint": unchanged, "jax_checkpoint": unchanged})


def jax_checkpoint(**options: Any) -> Callable[[Any], Any]:
    return lambda fun: jax.checkpoint(fun, **options)


def unchanged(**options: Any) -> Callable[[Any], Any]:
    del options
    return lambda fun: fun


@st.composite
def examples(draw) -> Example:
    derivatives = draw(st.sampled_from(["all", "all", "reverse", "forward"]))
    source = Writer(draw, derivatives).program()
    return Example(source, draw(compositions(derivatives)), draw(st.booleans()))
