"""What `saved_residuals` tells: types, bytes, names, places and origins."""

from functools import partial, wraps

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat
from remat import checkpoint, checkpoint_name, policies, saved_residuals
from remat._units import format_bytes


def line_of(marker: str) -> str:
    """`file:line` of the line of this file that ends in a comment `# marker`."""
    with open(__file__, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.rstrip().endswith(f"# {marker}"):
                return f"{__file__}:{number}"
    raise AssertionError(marker)


def descriptions(residuals: list[remat.Residual]) -> list[str]:
    return [description for _, description in residuals]


def layers(params, x):
    for w in params["w"]:
        x = jnp.tanh(x @ w)
        x = checkpoint_name(x, "act")  # named here
    return jnp.sum(x)


PARAMS = {"w": [jnp.ones((4, 4)), jnp.ones((4, 4))]}
X = jnp.ones((8, 4))


def test_pairs_with_attributes():
    residuals = saved_residuals(checkpoint(layers), PARAMS, X)
    assert all(len(pair) == 2 for pair in residuals)
    for residual, (aval, description) in zip(residuals, residuals, strict=True):
        assert residual.aval is aval
        assert residual.description is description
        assert residual.nbytes == aval.size * aval.dtype.itemsize


def test_no_policy_saves_only_the_arguments():
    residuals = saved_residuals(checkpoint(layers), PARAMS, X)
    assert descriptions(residuals) == [
        "from the argument params['w'][0]",
        "from the argument params['w'][1]",
        "from the argument x",
    ]
    assert [r.name for r in residuals] == ["params['w'][0]", "params['w'][1]", "x"]
    assert [r.source for r in residuals] == [None] * 3


def test_named_values_are_told_by_name_and_place():
    policy = policies.save_only_these_names("act")
    residuals = saved_residuals(checkpoint(layers, policy=policy), PARAMS, X)
    named = [r for r in residuals if r.name == "act"]
    place = line_of("named here")
    assert descriptions(named) == [f"named 'act' from {place} (layers)"] * 2
    assert [r.source for r in named] == [place] * 2
    assert len(residuals) == 5


def test_what_is_not_named_is_told_by_primitive_and_place():
    def f(x):
        y = jnp.sin(x)  # sine here
        return jnp.sum(y * y)

    residuals = saved_residuals(checkpoint(f, policy=policies.everything_saveable), X)
    place = line_of("sine here")
    function = "test_what_is_not_named_is_told_by_primitive_and_place.<locals>.f"
    assert sorted(descriptions(residuals)) == [
        f"output of cos from {place} ({function})",
        f"output of sin from {place} ({function})",
    ]


def test_literals_and_constants():
    constant = np.full(X.shape, 0.5, dtype=np.float32)
    residuals = saved_residuals(lambda x: jnp.sum(x * 2.5 * constant), X)
    assert sorted(descriptions(residuals)) == ["from a constant", "from a literal"]


def test_residuals_of_a_function_that_is_not_decorated():
    def f(x, y):
        x1, x2 = x
        return x1 * x2 * y

    residuals = saved_residuals(f, (2.0, 3.0), y=4.0)
    assert descriptions(residuals)[:3] == [
        "from the argument x[0]",
        "from the argument x[1]",
        "from the argument y",
    ]
    assert residuals[3].description.startswith("output of mul from ")
    assert len(residuals) == 4


def test_jit_is_opened():
    @jax.jit
    def inner(x):
        return jnp.exp(x)  # within jit

    (residual,) = saved_residuals(lambda x: jnp.sum(inner(x)), X)
    assert residual.source == line_of("within jit")
    assert residual.description.startswith("output of exp from ")


def test_jit_with_shardings_is_opened():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    inner = jax.jit(lambda x: jnp.exp(x), out_shardings=sharding)  # within sharded jit
    residuals = saved_residuals(lambda x: jnp.sum(inner(x)), X)
    assert [r.source for r in residuals] == [line_of("within sharded jit")]


def test_scan_is_opened():
    def f(x):
        def body(c, _):
            return jnp.sin(c), None  # within scan

        return jnp.sum(jax.lax.scan(body, x, None, length=5)[0])

    (residual,) = saved_residuals(f, X)
    assert residual.aval.shape == (5, *X.shape)
    assert residual.source == line_of("within scan")
    assert residual.description.endswith("stacked by a scan of length 5")


def test_nested_checkpoint_is_opened():
    def inner(x):
        return jnp.sin(checkpoint_name(jnp.sin(x), "deep"))  # within checkpoint

    nested = checkpoint(inner, policy=policies.save_only_these_names("deep"))
    residuals = saved_residuals(lambda x: jnp.sum(nested(jnp.sin(x))), X)
    (deep,) = (r for r in residuals if r.name == "deep")
    assert deep.source == line_of("within checkpoint")


def test_checkpoint_of_jax_is_opened():
    nested = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))
    residuals = saved_residuals(lambda x: jnp.sum(nested(x)), X)
    assert descriptions(residuals) == ["from the argument x"]


def test_the_place_is_that_of_this_call_of_a_function_of_jax_numpy():
    def f(x):
        x = x * jnp.linalg.norm(x)  # first norm
        return jnp.linalg.norm(x)  # second norm

    sources = {r.source for r in saved_residuals(f, X)}
    assert {line_of("first norm"), line_of("second norm")} <= sources


def test_types_stand_for_arguments():
    types = jax.ShapeDtypeStruct((3, 5), jnp.bfloat16)
    (residual,) = saved_residuals(checkpoint(lambda x: jnp.sum(jnp.sin(x))), types)
    assert (residual.aval.shape, residual.nbytes) == ((3, 5), 30)


def test_random_keys_count_what_they_are_made_of():
    def f(x, key):
        return jnp.sum(x * jax.random.normal(key, x.shape, x.dtype))

    residuals = saved_residuals(checkpoint(f), X, jax.random.key(0))
    (key,) = (r for r in residuals if r.name == "key")
    assert key.nbytes == 8


@pytest.mark.parametrize("args", [(jnp.arange(3),), (True,), ()])
def test_nothing_to_differentiate(args):
    assert saved_residuals(lambda *args: jnp.ones(3), *args) == []


def activated(x, mode, count=1):
    """Fails unless `mode` and `count` are Python values."""
    for _ in range(count):
        x = {"sin": jnp.sin, "relu": jax.nn.relu}[mode](x)
    return jnp.sum(checkpoint_name(x, "act") ** 2)


STATIC_CALLS = {
    "position": (("relu", 2), {}),
    "name": (("relu",), {"count": 2}),
    "both names": ((), {"count": 2, "mode": "relu"}),
    "default": (("sin",), {}),
}


@pytest.mark.parametrize("call", STATIC_CALLS)
@pytest.mark.parametrize(
    "static",
    [{"static_argnums": (1, 2)}, {"static_argnames": ("mode", "count")}],
    ids=str,
)
def test_static_arguments_of_a_checkpointed_function(static, call):
    args, kwargs = STATIC_CALLS[call]
    policy = policies.save_only_these_names("act")
    residuals = saved_residuals(
        checkpoint(activated, policy=policy, **static), X, *args, **kwargs
    )
    assert [r.name for r in residuals] == ["x", "act"]
    assert residuals[0].description == "from the argument x"


def test_static_arguments_are_printed(capsys):
    f = checkpoint(activated, static_argnums=1)
    remat.print_saved_residuals(f, X, "sin")
    assert "from the argument x\n" in capsys.readouterr().out


def test_static_argument_before_the_dynamic_one():
    f = checkpoint(lambda mode, x: activated(x, mode), static_argnums=0)
    assert descriptions(saved_residuals(f, "sin", X)) == ["from the argument x"]


def scaled_first(scale, x, mode):
    return activated(scale * x, mode)


class Layer:
    @partial(checkpoint, static_argnums=(0, 2, -1))
    def apply(self, x, mode, count=1):
        return activated(x, mode, count)


@pytest.mark.parametrize(
    ("fun", "args"),
    [
        (Layer().apply, (X, "sin", 2)),
        (Layer.apply, (Layer(), X, "sin", 2)),
        (partial(checkpoint(scaled_first, static_argnums=2), 2.0), (X, "sin")),
        (partial(checkpoint(activated, static_argnums=(1, 2)), count=2), (X, "sin")),
        (partial(Layer.apply, Layer()), (X, "sin", 2)),
    ],
    ids=["method", "function", "partial", "partial by name", "partial method"],
)
def test_static_arguments_of_methods_and_partials(fun, args):
    residuals = saved_residuals(fun, *args)
    assert "from the argument x" in descriptions(residuals)


def test_a_function_that_wraps_a_checkpointed_one_has_no_static_arguments():
    @wraps(checkpoint(activated, static_argnums=1))
    def wrapper(x, mode):
        return activated(x, mode)

    with pytest.raises(remat.UnsupportedError, match="Close over it: "):
        saved_residuals(wrapper, X, "sin")
    assert saved_residuals(lambda x: wrapper(x, "sin"), X)


def test_argument_that_is_no_array():
    with pytest.raises(remat.UnsupportedError) as caught:
        saved_residuals(activated, X, mode="sin")
    assert str(caught.value) == (
        "The argument mode of activated is 'sin' of type str, which JAX can't trace. "
        "Close over it: remat.saved_residuals(lambda x: activated(x, mode=mode), x)."
    )


def test_argument_that_is_needed_in_python():
    with pytest.raises(remat.TracedValueError) as caught:
        saved_residuals(lambda *args: activated(args[0], "sin", args[1]), X, 2)
    text = str(caught.value)
    assert "given to remat.saved_residuals, needs the value of the argument" in text
    assert "static" not in text
    assert text.endswith(
        "If it is a flag or a size rather than data, close over it: "
        "remat.saved_residuals(lambda x0: fun(x0, x1), x0). If it is data, use "
        "jax.lax.cond or jnp.where."
    )


def test_argument_within_a_pytree_that_is_no_array():
    with pytest.raises(remat.UnsupportedError) as caught:
        saved_residuals(lambda p: activated(**p), {"x": X, "mode": "sin"})
    assert str(caught.value).endswith(
        "Leave it out of the argument, and close over it."
    )


def test_checkpointed_function_whose_argument_is_not_static_yet():
    with pytest.raises(remat.UnsupportedError) as caught:
        saved_residuals(checkpoint(activated), X, "sin")
    assert str(caught.value).endswith(
        "Mark it static: remat.checkpoint(activated, static_argnames='mode')."
    )


def test_printed_largest_first_with_shares_and_a_total(capsys):
    policy = policies.save_only_these_names("act")
    remat.print_saved_residuals(checkpoint(layers, policy=policy), PARAMS, X)
    *rows, total = capsys.readouterr().out.splitlines()
    sizes = [int(row.split()[0]) for row in rows]
    assert sizes == [128, 128, 128, 64, 64]
    assert [row.split()[2] for row in rows] == ["25.0"] * 3 + ["12.5"] * 2
    assert rows[-1] == " 64 B  12.5 %  f32[4,4]  from the argument params['w'][1]"
    assert total == "total: 512 B in 5 residuals, 256 B of it arguments"


def test_printed_without_residuals(capsys):
    remat.print_saved_residuals(lambda x: x, X)
    assert capsys.readouterr().out == "No residuals are saved.\n"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (2**20, "1.0 MiB"),
        (5 * 2**30, "5.0 GiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_human_units(count, text):
    assert format_bytes(count) == text
