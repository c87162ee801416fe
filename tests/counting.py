"""Counting evaluations: in a jaxpr, and while a compiled program runs."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive, jaxprs_in_params
from jax.interpreters import ad, batching, mlir

# A function whose derivative reads its own output, so that a backward pass that did not
# save the output has to evaluate it again.
counted_p = Primitive("counted")
runs: Counter[str] = Counter()


def counted(x: Any, label: str = "") -> Any:
    return counted_p.bind(x, label=label)


def _evaluate(x, *, label):
    def on_host(x):
        runs[label] += 1
        return np.tanh(x)

    return jax.pure_callback(
        on_host, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims"
    )


@counted_p.def_impl
def counted_impl(x, *, label):
    return _evaluate(x, label=label)


@counted_p.def_abstract_eval
def counted_abstract_eval(x, *, label):
    del label
    return ShapedArray(x.shape, x.dtype)


def counted_jvp(primals, tangents, *, label):
    y = counted(*primals, label=label)
    (t,) = tangents
    return y, t * (jnp.ones_like(y) - y * y)


def counted_batch(operands, dims, *, label):
    return counted(*operands, label=label), dims[0]


ad.primitive_jvps[counted_p] = counted_jvp
batching.primitive_batchers[counted_p] = counted_batch
mlir.register_lowering(counted_p, mlir.lower_fun(_evaluate, multiple_results=False))


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of the jaxprs inside them, at any depth.

    What a loop or a call evaluates counts once for each place where it is called.
    """
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


def evaluations(fun: Any, *args: Any, primitive: str = "counted") -> int:
    """How often a primitive occurs in the jaxpr of `fun`."""
    jaxpr = jax.make_jaxpr(fun)(*args)
    return sum(eqn.primitive.name == primitive for eqn in equations(jaxpr))


def runs_of(fun: Any, *args: Any) -> int:
    """How often `counted` is evaluated by the compiled `fun`."""
    compiled = jax.jit(fun).lower(*args).compile()
    runs.clear()
    jax.block_until_ready(compiled(*args))
    return runs.total()
