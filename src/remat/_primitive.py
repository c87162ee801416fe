"""The primitive of rematerialization; its rules are in `remat._checkpoint`."""

from jax.extend.core import Primitive

remat_p = Primitive("remat")
remat_p.multiple_results = True
