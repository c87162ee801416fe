"""Several virtual CPU devices, strict dtype promotion, one key for every test."""

import os

# XLA reads these once, when the first backend starts.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

import hypothesis
import jax
import pytest

# Imported here because remat sets an XLA flag of its own on older JAX, which has to
# happen before any test starts a backend.
import remat  # noqa: F401

jax.config.update("jax_numpy_dtype_promotion", "strict")

# An example that compiles takes longer than the deadline of hypothesis, and a failure
# has to come back when the test is run again, on any host.
hypothesis.settings.register_profile("remat", deadline=None, derandomize=True)
hypothesis.settings.load_profile("remat")


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)
