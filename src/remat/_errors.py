"""The errors and warnings of remat: one name for each kind of thing to mend."""

import sys


class RematError(Exception):
    """Base of every error that remat raises on purpose."""


class PolicyError(RematError, TypeError):
    """A policy is no policy, or gave an answer that can't be acted on."""


class NameArgumentError(RematError, TypeError):
    """A name for `checkpoint_name` or for a policy is missing or no string."""


class StaticArgumentError(RematError, ValueError):
    """`static_argnums` or `static_argnames` don't fit the function or the call."""


class TracedValueError(RematError, TypeError):
    """Python code needed the concrete value of an argument that is traced."""


class UnsupportedError(RematError, NotImplementedError):
    """Something that can't be rematerialized correctly, with the way out."""


class InvalidScheduleError(RematError, ValueError):
    """A schedule reads what isn't there, leaves something out, or repeats too much."""


class InfeasibleBudgetError(RematError, MemoryError):
    """No plan within the budget was found.

    Attributes:
        smallest_peak_bytes: the smallest peak that was reached.
    """

    def __init__(self, message: str, smallest_peak_bytes: int):
        super().__init__(message)
        self.smallest_peak_bytes = smallest_peak_bytes


class UnknownNameWarning(UserWarning):
    """A policy names a value that occurs nowhere in the function."""


class BarrierWarning(UserWarning):
    """The compiler deletes the barriers that keep recomputation apart."""


def caller_stacklevel() -> int:
    """The `stacklevel` with which a warning points at the user's own code.

    Warnings arise deep inside a trace, below frames of JAX and of this package.
    """
    frame = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith(
        ("remat.", "jax.", "jaxlib.", "contextlib", "functools")
    ):
        frame, level = frame.f_back, level + 1
    return level if frame is not None else 1


def mutable_ref_error(function: str, what: str) -> UnsupportedError:
    """The error for a `function` that does `what` with a mutable array."""
    return UnsupportedError(
        f"The function {function}, given to remat.checkpoint, {what}. A recomputed "
        "read would see the value as it is by then, not as it was, and a recomputed "
        "write would happen twice. Pass the Ref's value instead (ref[...]) and write "
        "the result back outside of the checkpointed function."
    )
