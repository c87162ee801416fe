"""Rematerialization for JAX that really lowers the compiled peak memory."""

from remat import _barriers
from remat import _policies as policies
from remat._checkpoint import checkpoint, checkpoint_name
from remat._errors import (
    BarrierWarning,
    NameArgumentError,
    PolicyError,
    RematError,
    StaticArgumentError,
    TracedValueError,
    UnknownNameWarning,
    UnsupportedError,
)
from remat._residuals import Residual, print_saved_residuals, saved_residuals

__version__ = "0.1.0"
__all__ = [
    "BarrierWarning",
    "NameArgumentError",
    "PolicyError",
    "RematError",
    "Residual",
    "StaticArgumentError",
    "TracedValueError",
    "UnknownNameWarning",
    "UnsupportedError",
    "checkpoint",
    "checkpoint_name",
    "checkpoint_policies",
    "policies",
    "print_saved_residuals",
    "remat",
    "saved_residuals",
]

remat = checkpoint
checkpoint_policies = policies

# Before the first backend starts, or it has no effect.
_barriers.keep_on_cpu()
