"""What a function saves for its backward pass, in bytes and in the user's own terms."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Var
from jax.extend.core.primitives import jit_p, scan_p

from remat._arguments import StaticSpec, declared_spec
from remat._errors import RematError
from remat._jax import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    is_shard_map,
    name_p,
    num_bytes,
    scan_counts,
    shard_map_body,
    source_location,
)
from remat._linearize import is_differentiable, linearize
from remat._primitive import remat_p
from remat._trace import trace_call
from remat._units import format_bytes


class Residual(tuple[Any, str]):
    """A value that the backward pass needs: the pair (aval, description), and more.

    Attributes:
        aval: its shape and dtype.
        description: where it comes from, in words.
        nbytes: its size in bytes.
        name: the name that `checkpoint_name` gave it, or what the argument that it is
            is called, as in `params['w']`; None for all else.
        source: the place in the user's code that made it, as `file:line`; None where
            there is none.
    """

    nbytes: int
    name: str | None
    source: str | None

    def __new__(cls, aval: Any, origin: "_Origin") -> "Residual":
        """A residual of type `aval` from `origin`."""
        residual = super().__new__(cls, (aval, origin.description))
        residual.nbytes = num_bytes(aval)
        residual.name = origin.name
        residual.source = origin.source
        return residual

    @property
    def aval(self) -> Any:
        """Its shape and dtype."""
        return self[0]

    @property
    def description(self) -> str:
        """Where it comes from, in words."""
        return self[1]


def saved_residuals(
    fun: Callable[..., Any], *args: Any, **kwargs: Any
) -> list[Residual]:
    """What differentiating `fun(*args, **kwargs)` in reverse mode would save.

    Nothing is computed. Values inside of nested `jit`, `scan` and `checkpoint` are
    told by where they come from there.

    Args:
        fun: any function of arrays, with checkpoints in it or none.
        *args: its arguments: arrays, or `jax.ShapeDtypeStruct` for their types, and the
            static ones of a checkpointed function. For any other function close over
            what is no array, as in `lambda x: fun(x, 3)`.
        **kwargs: its keyword arguments. All of floating type are differentiated.

    Returns:
        A list of pairs (aval, description) that also have `.nbytes`, `.name` and
        `.source`; each value once, arguments that are needed included.

    Example:
        >>> import jax.numpy as jnp, remat
        >>> [(aval, description)] = remat.saved_residuals(
        ...     remat.checkpoint(lambda x: jnp.sin(jnp.sin(x))), jnp.ones(3))
        >>> description
        'from the argument x'
    """
    if not callable(fun):
        raise RematError(
            f"remat.saved_residuals got {fun!r} of type {type(fun).__name__}, which is "
            "not callable. Pass a function, then its arguments: "
            "remat.saved_residuals(f, x)."
        )
    spec = declared_spec(fun)
    if spec is not None:
        call, _ = trace_call(fun, spec, args, kwargs)
    else:
        none = StaticSpec(frozenset(), frozenset())
        call, _ = trace_call(fun, none, args, kwargs, caller="remat.saved_residuals")
    num_consts = len(call.consts)
    nonzero = [is_differentiable(aval) for aval in call.jaxpr.in_avals]
    nonzero[:num_consts] = [False] * num_consts
    if not any(nonzero):
        return []
    linearized = linearize(call.jaxpr, tuple(nonzero))
    invars = linearized.primal.jaxpr.invars
    operands = dict.fromkeys(invars, _CONSTANT)
    for v, name in zip(invars[-len(call.arg_names) :], call.arg_names, strict=True):
        operands[v] = _Origin(f"from the argument {name}", name, None)
    literals = {
        (str(v.aval), str(v.val)): v
        for eqn in linearized.linear
        for v in eqn.invars
        if isinstance(v, Literal)
    }
    return [
        *(Residual(v.aval, _LITERAL) for v in literals.values()),
        *(
            Residual(v.aval, _origin(v, linearized.primal, operands))
            for v in sorted(linearized.residuals, key=_position(linearized.primal))
        ),
    ]


def print_saved_residuals(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Print what `saved_residuals` returns: largest first, with shares and a total.

    Args:
        fun: any function of arrays.
        *args: its arguments.
        **kwargs: its keyword arguments.
    """
    print(residual_table(saved_residuals(fun, *args, **kwargs)))


def residual_table(residuals: list[Residual]) -> str:
    """The lines that `print_saved_residuals` prints."""
    total = sum(r.nbytes for r in residuals)
    if not residuals:
        return "No residuals are saved."
    largest_first = sorted(residuals, key=lambda r: -r.nbytes)
    rows = [
        (
            format_bytes(r.nbytes),
            f"{100 * r.nbytes / max(total, 1):.1f} %",
            r.aval.str_short(short_dtypes=True),
            r.description,
        )
        for r in largest_first
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    held = sum(r.nbytes for r in residuals if r.description.startswith("from the arg"))
    lines = [
        f"{size:>{widths[0]}}  {share:>{widths[1]}}  {kind:<{widths[2]}}  {origin}"
        for size, share, kind, origin in rows
    ]
    noun = "residual" if len(rows) == 1 else "residuals"
    summary = f"{format_bytes(total)} in {len(rows)} {noun}"
    if held:
        summary += f", {format_bytes(held)} of it arguments"
    return "\n".join([*lines, f"total: {summary}"])


@dataclass(frozen=True)
class _Origin:
    description: str
    name: str | None
    source: str | None


_LITERAL = _Origin("from a literal", None, None)
_CONSTANT = _Origin("from a constant", None, None)


def _origin(
    v: Var | Literal, program: ClosedJaxpr, operands: dict[Var, _Origin]
) -> _Origin:
    """Where `v`, a value of `program`, comes from; calls and loops are opened."""
    if isinstance(v, Literal):
        return _LITERAL
    if v in operands:
        return operands[v]
    eqn = next(e for e in program.eqns if v in e.outvars)
    location = source_location(eqn)
    source, place = location if location else (None, "an unknown place")
    if eqn.primitive is name_p:
        name = eqn.params["name"]
        return _Origin(f"named {name!r} from {place}", name, source)
    inner = _opened(eqn)
    if inner is None:
        return _Origin(f"output of {eqn.primitive.name} from {place}", None, source)
    inner_operands = {
        u: _origin(outer, program, operands)
        for u, outer in zip(inner.jaxpr.invars, eqn.invars, strict=True)
    }
    index = eqn.outvars.index(v)
    result = inner.jaxpr.outvars[index]
    if eqn.primitive is scan_p and isinstance(result, Var):
        # A stack of what is carried is told by what made the carry.
        num_consts, num_carry = scan_counts(eqn)
        carried = inner.jaxpr.invars[num_consts : num_consts + num_carry]
        if index >= num_carry and result in carried:
            result = inner.jaxpr.outvars[carried.index(result)]
    found = _origin(result, inner, inner_operands)
    if eqn.primitive is scan_p and v.aval.str_short() != result.aval.str_short():
        return _Origin(
            f"{found.description}, stacked by a scan of length {eqn.params['length']}",
            found.name,
            found.source,
        )
    return found


def _opened(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """What `eqn` evaluates, if each of its results is one of that program's."""
    if eqn.primitive in (remat_p, jit_p, scan_p):
        return eqn.params["jaxpr"]
    if is_shard_map(eqn):
        return shard_map_body(eqn)
    return None


def _position(program: ClosedJaxpr) -> Callable[[Var], int]:
    order = [*program.jaxpr.invars, *(v for e in program.eqns for v in e.outvars)]
    positions = {v: i for i, v in enumerate(order)}
    return positions.__getitem__
