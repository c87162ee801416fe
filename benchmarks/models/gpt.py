"""A decoder-only transformer, its blocks unrolled or in a loop."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name


class BlockParams(NamedTuple):
    """The parameters of one block, f32; `d` is the width of the model."""

    attention_scale: Array
    """`[d]`, of the layer norm in front of the attention."""
    qkv: Array
    """`[d, 3 * d]`."""
    projection: Array
    """`[d, d]`."""
    mlp_scale: Array
    """`[d]`, of the layer norm in front of the MLP."""
    up: Array
    """`[d, 4 * d]`."""
    down: Array
    """`[4 * d, d]`."""


class Params(NamedTuple):
    """The parameters of the model, f32."""

    embedding: Array
    """`[vocabulary, d]`, also the output matrix."""
    position: Array
    """`[length, d]`."""
    blocks: list[BlockParams] | BlockParams
    """One for each block, or one of stacked arrays, which is looped over."""
    final_scale: Array
    """`[d]`, of the layer norm in front of the output matrix."""


Batch = tuple[Array, Array]
Block = Callable[[BlockParams, Array], Array]
NameBlock = Callable[[Array], Array]
WrapBlock = Callable[[Block], Block]

NAME = "blk"


@dataclass(frozen=True)
class Config:
    """The sizes of the model and of its batch."""

    blocks: int = 8
    width: int = 256
    heads: int = 4
    length: int = 256
    """Tokens of one sequence."""
    batch: int = 8
    """Sequences of one batch."""
    vocabulary: int = 512


def init(key: Array, config: Config) -> Params:
    """Return parameters, normal with a standard deviation of 0.02, scales one."""
    d = config.width
    embedding_key, position_key, *block_keys = jax.random.split(key, config.blocks + 2)

    def normal(key: Array, *shape: int) -> Array:
        return 0.02 * jax.random.normal(key, shape)

    blocks: list[BlockParams] = []
    for block_key in block_keys:
        qkv_key, projection_key, up_key, down_key = jax.random.split(block_key, 4)
        blocks.append(
            BlockParams(
                attention_scale=jnp.ones(d),
                qkv=normal(qkv_key, d, 3 * d),
                projection=normal(projection_key, d, d),
                mlp_scale=jnp.ones(d),
                up=normal(up_key, d, 4 * d),
                down=normal(down_key, 4 * d, d),
            )
        )
    return Params(
        embedding=normal(embedding_key, config.vocabulary, d),
        position=normal(position_key, config.length, d),
        blocks=blocks,
        final_scale=jnp.ones(d),
    )


def stacked(params: Params) -> Params:
    """Return the same parameters with those of the blocks along a leading axis."""
    if isinstance(params.blocks, BlockParams):
        return params
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params.blocks)
    return params._replace(blocks=stack)


def make_batch(key: Array, config: Config) -> Batch:
    """Return random tokens and the tokens that follow, each `[batch, length]` i32."""
    shape = (config.batch, config.length + 1)
    tokens = jax.random.randint(key, shape, 0, config.vocabulary)
    return tokens[:, :-1], tokens[:, 1:]


def name_output(x: Array) -> Array:
    """Name `x` for the policies of the benchmark."""
    return checkpoint_name(x, NAME)


def layer_norm(x: Array, scale: Array) -> Array:
    """Return `x`, `[..., d]`, at zero mean and unit variance, times `scale`, `[d]`."""
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.var(x, axis=-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * scale


def attention(params: BlockParams, x: Array, heads: int) -> Array:
    """Return causal self-attention over `x`, `[batch, length, d]`."""
    batch, length, d = x.shape
    qkv = (x @ params.qkv).reshape(batch, length, 3, heads, d // heads)
    q, k, v = (jnp.moveaxis(qkv[:, :, i], 1, 2) for i in range(3))
    scores = q @ jnp.swapaxes(k, -1, -2) * (d // heads) ** -0.5
    mask = jnp.tril(jnp.ones((length, length), dtype=bool))
    # Not `-inf`: softmax of finite scores has finite gradients everywhere.
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
    mixed = jnp.moveaxis(weights @ v, 1, 2).reshape(batch, length, d)
    return mixed @ params.projection


def block(params: BlockParams, x: Array, heads: int) -> Array:
    """Return attention and MLP, each added to its input, `[batch, length, d]`."""
    x = x + attention(params, layer_norm(x, params.attention_scale), heads)
    hidden = jax.nn.gelu(layer_norm(x, params.mlp_scale) @ params.up)
    return x + hidden @ params.down


def loss(
    params: Params,
    batch: Batch,
    config: Config,
    *,
    name_block: NameBlock = name_output,
    wrap_block: WrapBlock | None = None,
) -> Array:
    """Return the mean cross entropy of the next tokens in nats, a scalar.

    Args:
        params: the parameters.
        batch: tokens and the tokens that follow, each `[batch, length]` i32.
        config: the sizes; the batch may be shorter or smaller.
        name_block: applied to the output of each block.
        wrap_block: applied to the block function, `jax.checkpoint` for example.
            Nothing outside the block is inside what it wraps.
    """
    tokens, targets = batch

    def apply(params: BlockParams, x: Array) -> Array:
        return block(params, x, config.heads)

    wrapped = apply if wrap_block is None else wrap_block(apply)
    x = params.embedding[tokens] + params.position[: tokens.shape[1]]
    if isinstance(params.blocks, BlockParams):

        def step(x: Array, block_params: BlockParams) -> tuple[Array, None]:
            return name_block(wrapped(block_params, x)), None

        x, _ = lax.scan(step, x, params.blocks)
    else:
        for block_params in params.blocks:
            x = name_block(wrapped(block_params, x))
    logits = layer_norm(x, params.final_scale) @ params.embedding.T
    log_probabilities = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1)
    return -jnp.mean(picked)
