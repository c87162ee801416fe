"""What equations cost: work and memory traffic, and the time both take on a device.

A roofline (Williams et al., 2009): a group of equations that is evaluated as one kernel
takes as long as its arithmetic or as its memory traffic does, whichever is longer, and
a little for its launch.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
from jax.extend.core import Var, jaxprs_in_params

from remat._jax import ClosedJaxpr, JaxprEqn, num_bytes


@dataclass(frozen=True)
class Rates:
    """How fast a device is.

    Attributes:
        product_flops: floating-point operations per second in matrix products and
            convolutions.
        vector_flops: the same elsewhere, an addition or a multiplication being one.
        bytes_per_second: to and from its memory.
        launch_seconds: what a kernel takes at least.
    """

    product_flops: float
    vector_flops: float
    bytes_per_second: float
    launch_seconds: float


@dataclass(frozen=True)
class Work:
    """What equations have to do, whatever the device.

    Attributes:
        product_flops: operations in matrix products and convolutions.
        vector_flops: operations elsewhere, in additions.
        moved_bytes: read from memory and written to it.
        kernels: how many kernels are started.
    """

    product_flops: float = 0.0
    vector_flops: float = 0.0
    moved_bytes: float = 0.0
    kernels: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.product_flops + other.product_flops,
            self.vector_flops + other.vector_flops,
            self.moved_bytes + other.moved_bytes,
            self.kernels + other.kernels,
        )

    def __mul__(self, times: float) -> "Work":
        return Work(
            self.product_flops * times,
            self.vector_flops * times,
            self.moved_bytes * times,
            self.kernels * times,
        )

    def seconds(self, rates: Rates) -> float:
        """The time it takes at these rates."""
        arithmetic = (
            self.product_flops / rates.product_flops
            + self.vector_flops / rates.vector_flops
        )
        traffic = self.moved_bytes / rates.bytes_per_second
        return max(arithmetic, traffic) + self.kernels * rates.launch_seconds


# Peak rates of the data sheets, dense, of the type that products run in by default,
# times what long products and copies reach of them.
_GPUS = {
    "V100": Rates(0.6 * 125e12, 0.5 * 15e12, 0.8 * 0.9e12, 4e-6),
    "A100": Rates(0.6 * 156e12, 0.5 * 19e12, 0.8 * 1.9e12, 4e-6),
    "H100": Rates(0.6 * 494e12, 0.5 * 67e12, 0.8 * 3.3e12, 4e-6),
    "H200": Rates(0.6 * 494e12, 0.5 * 67e12, 0.8 * 4.8e12, 4e-6),
}
_PLATFORMS = {
    "gpu": _GPUS["A100"],
    "tpu": Rates(0.6 * 197e12, 0.5 * 4e12, 0.8 * 0.8e12, 2e-6),
    "cpu": Rates(5e10, 8e9, 1e10, 2e-6),
}


def default_rates(device: Any) -> Rates:
    """The rates of a device by its kind, those of a usual one of its platform else."""
    for name, rates in _GPUS.items():
        if name in device.device_kind:
            return rates
    return _PLATFORMS.get(device.platform, _PLATFORMS["gpu"])


# How many additions an elementwise function takes as long as.
_SHORT = """
exp exp2 expm1 log log1p logistic tanh sin cos tan erf erfc sqrt rsqrt cbrt integer_pow
div rem
"""
_LONG = """
pow atan2 erf_inv lgamma digamma igamma igammac regularized_incomplete_beta asin acos
atan sinh cosh asinh acosh atanh bessel_i0e bessel_i1e random_bits random_fold_in
random_split random_seed threefry2x32 sort top_k cumsum cumprod cummax cummin
cumlogsumexp
"""
_VECTOR_FLOPS = {
    name: flops
    for names, flops in ((_SHORT, 4.0), (_LONG, 30.0))
    for name in names.split()
}


def work(eqns: Iterable[JaxprEqn], reads: Sequence[Any], makes: Sequence[Any]) -> Work:
    """The work of equations that are evaluated as one kernel.

    Args:
        eqns: the equations.
        reads: the types of what is read from memory.
        makes: the types of what is written to memory.
    """
    total = Work(moved_bytes=sum(map(num_bytes, (*reads, *makes))))
    loops = 0
    for eqn in eqns:
        inner = _inner_work(eqn)
        if inner is not None:
            total, loops = total + inner, loops + 1
            continue
        total += _arithmetic(eqn)
    return total + Work(kernels=1 if not loops else 0)


@lru_cache(maxsize=4096)
def _program_work(program: Any) -> Work:
    total = Work()
    for eqn in program.eqns:
        # Inside of a program about half of the traffic is within fused kernels.
        reads = [v.aval for v in eqn.invars if isinstance(v, Var)]
        inner = work([eqn], reads, [v.aval for v in eqn.outvars])
        if inner.product_flops == 0:
            inner = Work(
                inner.product_flops,
                inner.vector_flops,
                inner.moved_bytes / 2,
                inner.kernels / 2,
            )
        total += inner
    return total


def _inner_work(eqn: JaxprEqn) -> Work | None:
    """The work of the programs in an equation; None if it has none."""
    programs = [
        p.jaxpr if isinstance(p, ClosedJaxpr) else p
        for p in jaxprs_in_params(eqn.params)
    ]
    name, params = eqn.primitive.name, eqn.params
    if name == "pallas_call":
        return _kernel_work(eqn)
    if not programs or name in ("reduce", "scatter", "scatter-add", "reduce_window"):
        return None
    if name.startswith(("scatter", "reduce", "argm", "sort")):
        return None
    works = [_program_work(program) for program in programs]
    if name == "scan":
        return works[0] * params["length"]
    if name == "cond":
        return max(works, key=lambda w: (w.product_flops, w.moved_bytes))
    if name.startswith("custom_") or name in ("remat_opt",):
        return works[0]
    total = sum(works, Work())
    # How often a `while` runs isn't known: as often as few iterations of a solver do.
    return total * 10 if name == "while" else total


def _kernel_work(eqn: JaxprEqn) -> Work:
    estimate = eqn.params.get("cost_estimate")
    types = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    moved = sum(map(num_bytes, types))
    if estimate is None:
        # A product of the two largest operands, for want of anything better.
        sizes = sorted((getattr(t, "size", 0) for t in types), reverse=True)
        return Work(product_flops=2.0 * sum(sizes[:2]) * 128, moved_bytes=moved)
    return Work(
        product_flops=float(estimate.flops),
        vector_flops=4.0 * float(estimate.transcendentals),
        moved_bytes=float(estimate.bytes_accessed or moved),
    )


def _arithmetic(eqn: JaxprEqn) -> Work:
    name, params = eqn.primitive.name, eqn.params
    operands: list[Any] = [v.aval for v in eqn.invars]
    out_size = sum(getattr(v.aval, "size", 0) for v in eqn.outvars)
    if name in ("dot_general", "ragged_dot", "ragged_dot_general"):
        lhs = operands[0]
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            depth = math.prod(lhs.shape[d] for d in contracted)
        else:
            depth = lhs.shape[-1]
        return Work(product_flops=2.0 * out_size * depth)
    if name == "conv_general_dilated":
        kernel = operands[1]
        numbers = params["dimension_numbers"]
        features = kernel.shape[numbers.rhs_spec[0]]
        per_output = kernel.size / max(features, 1)
        dilation = math.prod(params["lhs_dilation"])
        return Work(product_flops=2.0 * out_size * per_output / dilation)
    in_size = sum(getattr(aval, "size", 0) for aval in operands)
    if name.startswith(("reduce_window", "select_and")):
        window = math.prod(params.get("window_dimensions", (8,)))
        return Work(vector_flops=float(out_size * window))
    if name in _DENSE_LINEAR_ALGEBRA:
        shape = operands[0].shape
        order = max(shape[-2:], default=1)
        return Work(product_flops=float(_DENSE_LINEAR_ALGEBRA[name] * in_size * order))
    if name == "fft":
        length = math.prod(params["fft_lengths"])
        return Work(vector_flops=5.0 * out_size * max(math.log2(max(length, 2)), 1))
    weight = _VECTOR_FLOPS.get(name, 1.0)
    size = max(out_size, in_size) if name.startswith(("reduce", "arg")) else out_size
    return Work(vector_flops=weight * size)


# Operations per element and order of the matrix.
_DENSE_LINEAR_ALGEBRA = {
    "cholesky": 1 / 3,
    "lu": 2 / 3,
    "qr": 4 / 3,
    "geqrf": 4 / 3,
    "householder_product": 4 / 3,
    "triangular_solve": 1.0,
    "svd": 12.0,
    "eigh": 9.0,
    "eig": 25.0,
    "schur": 25.0,
    "hessenberg": 10 / 3,
    "tridiagonal": 4 / 3,
}


def measured_device() -> Any:
    """The device that a function is compiled for by default."""
    return getattr(jax.config, "jax_default_device", None) or jax.devices()[0]
