"""Keeping optimization barriers alive on CPUs with jaxlib before 0.11.

There the CPU compiler expands barriers before it eliminates common subexpressions. That
undoes every rematerialization, `jax.checkpoint` included. Disabling the pass that does
so, named `cse_barrier_expander`, brings them back. `small-while-loop-hoisting` then has
to go too: it makes kernels of short loops, and aborts the process at a barrier. XLA
reads its flags when its first backend starts, so the flag has to be set before;
importing remat does that.

Set `REMAT_SET_XLA_FLAGS=0` to keep remat from touching `XLA_FLAGS`.
"""

import os
import warnings
from importlib.metadata import entry_points
from importlib.util import find_spec

from remat._errors import BarrierWarning, caller_stacklevel
from remat._jax import JAXLIB_VERSION, backends_started, platforms_setting

SWITCH = "REMAT_SET_XLA_FLAGS"
PASSES = ("cse_barrier_expander", "small-while-loop-hoisting")
_FLAG = "--xla_disable_hlo_passes="

_why_deleted: str | None = None  # None where barriers survive
_warned = False


def keep_on_cpu() -> None:
    """Set the flag that keeps barriers alive, where it is needed and does no harm."""
    global _why_deleted
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if JAXLIB_VERSION >= (0, 11):
        return
    if os.environ.get(SWITCH, "1").lower() in ("0", "false", "no", "off"):
        return
    if backends_started():
        if PASSES[0] in flags:
            return
        _why_deleted = "JAX had already started its backend when remat was imported"
    elif flags and not flags.startswith("--"):
        _why_deleted = "XLA_FLAGS names a file of flags, which remat leaves alone"
    elif _other_platform_possible():
        # The flag is one for all backends, and GPU compilers need the pass.
        _why_deleted = "remat sets XLA flags only where no accelerator plugin is found"
    else:
        os.environ["XLA_FLAGS"] = with_passes_disabled(flags)


def with_passes_disabled(flags: str) -> str:
    """`flags` with the passes added to those that it disables already."""
    words = flags.split()
    others = [word for word in words if not word.startswith(_FLAG)]
    disabling = [word for word in words if word.startswith(_FLAG)]
    # Where a flag is given twice, XLA takes the last.
    names = disabling[-1].removeprefix(_FLAG).split(",") if disabling else []
    names += [name for name in PASSES if name not in names]
    return " ".join([*others, _FLAG + ",".join(filter(None, names))])


def warn_if_deleted() -> None:
    """Warn, once, that a backward pass is compiled without its barriers."""
    global _warned
    if _why_deleted is None or _warned:
        return
    _warned = True
    warnings.warn(
        "On the CPU, jaxlib "
        + ".".join(map(str, JAXLIB_VERSION))
        + " deletes the barriers that keep recomputation apart, so rematerialization "
        f"will not lower the peak memory; {_why_deleted}. Import remat before the "
        "first JAX computation, or set the environment variable XLA_FLAGS="
        f"{_FLAG}{','.join(PASSES)} before Python starts, or use jaxlib 0.11 or newer. "
        f"{SWITCH}=0 silences this.",
        BarrierWarning,
        stacklevel=caller_stacklevel(),
    )


def _other_platform_possible() -> bool:
    platforms = platforms_setting() or os.environ.get("JAX_PLATFORMS", "")
    if platforms:
        return platforms != "cpu"
    return find_spec("libtpu") is not None or bool(entry_points(group="jax_plugins"))
