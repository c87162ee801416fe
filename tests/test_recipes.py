"""The recipes of the documentation run, compute the same, and save what they say."""

import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import flax.errors
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.core import Tracer

import remat

RECIPES = pathlib.Path(__file__).parents[1] / "docs" / "recipes.md"
TEXT = RECIPES.read_text(encoding="utf-8")
# Heading -> the text below it.
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S))
LIBRARIES = ["Flax Linen", "Flax NNX", "Equinox", "Haiku"]

# What the recipes say to write for the library's own rematerialization, in both ways.
INSIDE = {
    "Flax Linen": (
        "Block()(x, train)",
        "nn.remat(Block, static_argnums=2)()(x, train)",
    ),
    "Flax NNX": ("y = block(x)", "y = nnx.remat(Block.__call__)(block, x)"),
    "Equinox": (
        "remat.checkpoint(block)",
        "remat.checkpoint(eqx.filter_checkpoint(block))",
    ),
    "Haiku": ("Block()(x, train)", "hk.remat(Block(), static_argnums=1)(x, train)"),
}


@pytest.fixture(autouse=True)
def _as_users_have_it_but_compiled_quickly() -> Iterator[None]:
    # LLVM's optimizations come after buffers are assigned, and take much of the time.
    jax.config.update("jax_disable_most_optimizations", True)
    # Haiku relies on the promotion of dtypes that is JAX's default.
    with jax.numpy_dtype_promotion("standard"):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


def program(library: str) -> str:
    """The program of a recipe, on the lines that it has in the document."""
    (code,) = re.findall(r"```python\n(.*?)```", SECTIONS[library], re.DOTALL)
    return "\n" * TEXT[: TEXT.index(code)].count("\n") + code


def edited(code: str, *edits: tuple[str, str]) -> str:
    for old, new in edits:
        assert old in code
        code = code.replace(old, new)
    return code


def no_checkpoint(fun: Callable[..., Any] | None = None, **options: Any) -> Any:
    """In the place of `remat.checkpoint`: the same program without it."""
    del options
    return fun if fun is not None else lambda fun: fun


def run(code: str, checkpoint: Callable[..., Any] = remat.checkpoint) -> dict[str, Any]:
    """The variables of a recipe after it ran with `checkpoint`."""
    namespace: dict[str, Any] = {"__name__": "recipe"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remat, "checkpoint", checkpoint)
        exec(compile(code, RECIPES, "exec"), namespace)
    return namespace


def arrays(namespace: dict[str, Any]) -> dict[str, Any]:
    """The arrays of the final state, by path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(namespace["state"])
    return {
        jax.tree_util.keystr(path): np.asarray(
            jax.random.key_data(leaf)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        )
        for path, leaf in leaves
        if isinstance(leaf, jax.Array)
    }


def check_equal(with_remat: dict[str, Any], without: dict[str, Any]) -> None:
    """Compare losses, parameters, moments of Adam and running statistics."""
    np.testing.assert_allclose(with_remat["loss"], without["loss"], rtol=1e-5)
    actual, expected = arrays(with_remat), arrays(without)
    assert actual.keys() == expected.keys()
    kinds = set()
    for path, value in expected.items():
        if not np.issubdtype(value.dtype, np.floating):
            np.testing.assert_array_equal(actual[path], value, err_msg=path)
            continue
        # The first moments are averages of the gradients. Adam makes steps of the same
        # length of small gradients as of large ones, of their rounding errors too, so
        # the parameters agree less well.
        moment = re.search(r"\b[mn]u\b", path)
        kinds.add(moment[0] if moment else "other")
        error = np.linalg.norm(actual[path] - value)
        assert error <= (1e-4 if moment else 1e-3) * np.linalg.norm(value), path
    assert kinds == {"mu", "nu", "other"}


def temp_mib(namespace: dict[str, Any]) -> float:
    return namespace["memory"].temp_size_in_bytes / 2**20


@pytest.mark.parametrize("library", LIBRARIES)
def test_recipe(library, capsys):
    figures = r"Temporary memory: ([\d.]+) MiB without, ([\d.]+) MiB with \(([\d.]+)\)"
    ((mib_without, mib_with, ratio),) = re.findall(figures, SECTIONS[library])
    assert f"{mib_without} MiB | {mib_with} MiB | {ratio} |" in TEXT
    assert float(ratio) == pytest.approx(float(mib_with) / float(mib_without), abs=0.01)

    without = run(program(library), no_checkpoint)
    capsys.readouterr()
    with_remat = run(program(library))
    assert capsys.readouterr().out == f"{temp_mib(with_remat):.1f} MiB\n"

    check_equal(with_remat, without)
    assert temp_mib(without) == pytest.approx(float(mib_without), rel=0.1)
    assert temp_mib(with_remat) == pytest.approx(float(mib_with), rel=0.1)


@pytest.mark.parametrize("library", LIBRARIES)
def test_rematerialization_of_the_library_inside(library):
    old, new = INSIDE[library]
    assert f"`{new}`" in SECTIONS[library]
    blocks = ("split(key, 7)", "split(key, 3)") if library == "Equinox" else None
    code = edited(
        program(library),
        (old, new),
        blocks or ("range(6)", "range(2)"),
        ("(512, 64)", "(32, 64)"),
    )
    check_equal(run(code), run(code, no_checkpoint))


def test_keys_of_another_implementation():
    (saved, before) = re.findall(
        r'impl="rbg"\)` the same step takes ([\d.]+)\nMiB instead of ([\d.]+)\.', TEXT
    )[0]
    assert f"{before} MiB with" in SECTIONS["Flax Linen"]
    code = edited(
        program("Flax Linen"),
        ("jax.random.key(2)", 'jax.random.key(2, impl="rbg")'),
        ("jax.random.key(i)", 'jax.random.key(i, impl="rbg")'),
    )
    assert temp_mib(run(code)) == pytest.approx(float(saved), rel=0.1)


def test_linen_leaks_tracers_from_inside_a_module(key):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            norm = nn.BatchNorm(use_running_average=False)
            return remat.checkpoint(norm)(x)

    variables = Model().init(key, jnp.ones((3, 4)))
    assert all(isinstance(x, Tracer) for x in jax.tree.leaves(variables))


def test_nnx_module_that_is_closed_over_is_refused():
    block = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    with pytest.raises(
        flax.errors.TraceContextError,
        match="Cannot mutate BatchStat from a different trace level",
    ):
        remat.checkpoint(block)(jnp.ones((3, 4)))


def test_nnx_module_that_is_an_argument_loses_its_state():
    block = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    x = jnp.ones((3, 4))
    remat.checkpoint(lambda block, x: block(x))(block, x)
    np.testing.assert_array_equal(block.mean[...], 0)
    block(x)
    assert np.all(block.mean[...] != 0)


def test_equinox_module_is_closed_over_or_partitioned(key):
    linear = eqx.nn.Linear(4, 4, key=key)
    block = eqx.nn.Sequential([linear, eqx.nn.Lambda(jnp.tanh)])
    x = jnp.ones(4)
    with pytest.raises(remat.RematError, match="which JAX can't trace"):
        remat.checkpoint(lambda block, x: block(x))(block, x)

    def loss(arrays, static, x):
        return eqx.combine(arrays, static)(x).sum()

    dynamic, static = eqx.partition(block, eqx.is_array)
    checkpointed = remat.checkpoint(loss, static_argnums=1)
    actual = jax.grad(checkpointed)(dynamic, static, x)
    expected = jax.grad(loss)(dynamic, static, x)
    jax.tree.map(np.testing.assert_allclose, actual, expected)


def test_haiku_refuses_checkpoint_inside(key):
    @hk.transform
    def model(x):
        return remat.checkpoint(hk.Linear(4))(x)

    with pytest.raises(jax.errors.UnexpectedTracerError, match="escape"):
        jax.jit(model.init)(key, jnp.ones((3, 4)))
