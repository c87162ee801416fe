"""A deep multilayer perceptron: the smallest program on which remat shows."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

Params = list[Array]
Batch = Array
Layer = Callable[[Array, Array], Array]
NameBlock = Callable[[Array], Array]
WrapBlock = Callable[[Layer], Layer]

NAME = "a"


@dataclass(frozen=True)
class Config:
    """The sizes of the perceptron."""

    layers: int = 32
    width: int = 256
    batch: int = 4096
    named_every: int = 6
    """Every layer whose number, counted from one, divides by this is named."""


def init(key: Array, config: Config) -> Params:
    """Return one `[width, width]` f32 matrix per layer.

    The entries are normal with variance `1 / width`, so that activations keep their
    scale through all layers.
    """
    shape = (config.width, config.width)
    keys = jax.random.split(key, config.layers)
    return [jax.random.normal(k, shape) * config.width**-0.5 for k in keys]


def make_batch(key: Array, config: Config) -> Batch:
    """Return normal inputs, `[batch, width]` f32."""
    return jax.random.normal(key, (config.batch, config.width))


def name_output(x: Array) -> Array:
    """Name `x` for the policies of the benchmark."""
    return checkpoint_name(x, NAME)


def layer(w: Array, x: Array) -> Array:
    """Return `tanh(sin(x @ w))`, `[batch, width]`."""
    return jnp.tanh(jnp.sin(x @ w))


def loss(
    params: Params,
    batch: Batch,
    config: Config,
    *,
    name_block: NameBlock = name_output,
    wrap_block: WrapBlock | None = None,
) -> Array:
    """Return the mean square of the output, a scalar.

    Args:
        params: one `[width, width]` matrix per layer.
        batch: the inputs, `[batch, width]`.
        config: the sizes.
        name_block: applied to the output of every `named_every`-th layer.
        wrap_block: applied to the layer, `jax.checkpoint` for example. Nothing
            outside the layer is inside what it wraps.
    """

    # A function of this call alone: traces that JAX cached for another call do not
    # shorten the tracing that the benchmark times.
    def apply(w: Array, x: Array) -> Array:
        return layer(w, x)

    wrapped = apply if wrap_block is None else wrap_block(apply)
    x = batch
    for number, w in enumerate(params, start=1):
        x = wrapped(w, x)
        if number % config.named_every == 0:
            x = name_block(x)
    return jnp.mean(jnp.square(x))
