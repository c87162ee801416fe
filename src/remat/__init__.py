"""Rematerialization for JAX that really lowers the compiled peak memory."""

from remat import _barriers
from remat import _policies as policies
from remat._checkpoint import checkpoint as checkpoint
from remat._checkpoint import checkpoint_name as checkpoint_name

_barriers.keep_on_cpu()

remat = checkpoint
checkpoint_policies = policies
