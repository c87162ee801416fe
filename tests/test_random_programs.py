"""Random programs under random compositions, against the undecorated programs."""

import os
import warnings

import jax
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from problems import assert_close, compiled
from random_compositions import FORWARD, REVERSE, Example, arguments, examples
from random_programs import EXPRESSIONS, NAMESPACE, REVERSE_ONLY, TYPES

import remat

# How many to draw: few by default, a thousand in `make test-random`.
NUM_EXAMPLES = int(os.environ.get("RANDOM_PROGRAMS", "24"))
# Parts can run in parallel. Each has a seed of its own, so that the programs are the
# same in every run.
PART = 12
TOLERANCE = 1e-5


def drawn(part: int, max_examples: int):
    """`given` a number of examples, without what would search for them by time."""

    def decorate(test):
        settled = settings(
            max_examples=max_examples,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )
        return seed(part)(settled(given(examples())(test)))

    return decorate


def strong(arrays):
    """Without weak types, which a call can keep where the inlined function does not."""
    return [jax.lax.convert_element_type(x, x.dtype) for x in arrays]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(-(-NUM_EXAMPLES // PART)))
def test_random_programs(part):
    @drawn(part, min(PART, NUM_EXAMPLES - part * PART))
    def check(example: Example):
        fun, args = example.undecorated()
        expected = compiled(fun)(*args)
        fun, args = example.decorated()
        with warnings.catch_warnings():
            # Most policies know names that the program does not have.
            warnings.simplefilter("ignore", remat.UnknownNameWarning)
            actual = fun(*args) if example.eager else compiled(fun)(*args)
        assert_close(strong(actual), strong(expected), TOLERANCE)

    check()
    jax.clear_caches()  # they hold the compiled code of all examples


def test_examples_vary():
    """What is to be drawn is drawn, if not in every part."""
    found: list[Example] = []

    @drawn(0, 200)
    def collect(example):
        found.append(example)

    collect()
    sources = "".join(example.source for example in found)
    for word in (
        "    @checkpoint(policy=policies.save_from_both_policies",
        "            @checkpoint",  # nested in two functions
        "prevent_cse=False",
        "@jax_checkpoint",
        "@jax.jit",
        "@jax.vmap",
        "@jax.grad",
        "jax.lax.scan",
        "jax.lax.cond",
        "jax.lax.switch",
        "jax.lax.fori_loop(0, 2,",
        "jax.lax.fori_loop(0, i",
        "checkpoint_name",
        "doubled_sine",
        "tripled",
    ):
        assert word in sources
    steps = {step.name for example in found for step in example.steps}
    assert steps == {*FORWARD, *REVERSE, "vmap", "jit", "scan", "checkpoint"}
    assert {len(example.steps) for example in found} >= {1, 2, 3}
    assert {example.eager for example in found} == {True, False}


@pytest.mark.parametrize("kind", TYPES)
def test_expressions_have_their_type(kind):
    floats, others = arguments()
    values = dict(zip(TYPES, (*floats, *others), strict=True))
    names = {t: t for t in TYPES} | {"x": kind, "name": "a"}
    for template in (*EXPRESSIONS[kind], *[REVERSE_ONLY] * (kind in "svm")):
        code = template.format(**names)
        result = jax.eval_shape(lambda c=code: eval(c, {**NAMESPACE, **values}))
        expected = jax.typeof(values[kind])
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype), code
        assert not result.weak_type, code
