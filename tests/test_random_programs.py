"""Random programs under random compositions of transformations.

The number of examples is that of the environment variable RANDOM_PROGRAMS.
"""

import os
import warnings

import jax
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from problems import assert_close, compiled
from random_compositions import Example, examples

import remat

# Parts run in parallel, each with a seed of its own.
NUM_EXAMPLES = int(os.environ.get("RANDOM_PROGRAMS", "40"))
PART = 25


def check(example: Example) -> None:
    fun, args = example.undecorated()
    expected = compiled(fun)(*args)
    fun, args = example.decorated()
    with warnings.catch_warnings():
        # A policy may know names that the program does not have.
        warnings.simplefilter("ignore", remat.UnknownNameWarning)
        actual = fun(*args) if example.eager else compiled(fun)(*args)
    assert_close(actual, expected, 1e-4)


@pytest.mark.parametrize("part", range(-(-NUM_EXAMPLES // PART)))
def test_random_programs(part):
    @seed(part)
    @settings(
        max_examples=min(PART, NUM_EXAMPLES - part * PART),
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(examples())
    def run(example):
        check(example)

    run()
    jax.clear_caches()  # which would hold the compiled code of all examples
