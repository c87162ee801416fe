"""Tracing a Python function to a program, once for each kind of arguments.

A trace is kept for as long as the function lives and is used again for arguments of
the same types. It is not where that could be wrong: where it closed over a tracer,
where the function is a method or another object that may have changed, or where a
variable that it closes over was bound anew.
"""

import inspect
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import jax
from jax.core import Tracer
from jax.tree_util import keystr

from remat._errors import StaticArgumentError, TracedValueError, UnsupportedError
from remat._flatten import flatten
from remat._jax import ClosedJaxpr, DebugInfo, is_ref, ref_effects, trace, trace_context

# The class of `jax.tree.structure(x)` is no type to a type checker.
TreeDef = Any


@dataclass(frozen=True)
class StaticSpec:
    """Which arguments of a function are static, by position and by name."""

    positions: frozenset[int]
    names: frozenset[str]

    def split(
        self, fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[dict[int | str, Any], list[Any], dict[str, Any]]:
        """The static arguments, then the others; None stands for static positions.

        Raises:
            StaticArgumentError: a static argument can't be hashed.
        """
        positions = {p + len(args) if p < 0 else p for p in self.positions}
        static: dict[int | str, Any] = {
            i: x for i, x in enumerate(args) if i in positions
        }
        static |= {name: x for name, x in kwargs.items() if name in self.names}
        for where, value in static.items():
            try:
                hash(value)
            except TypeError:
                label = argument_name(fun, where)
                raise StaticArgumentError(
                    f"The static argument {label} of {function_name(fun)} is "
                    f"{_shown(value)} of type {type(value).__name__}, which can't be "
                    "hashed. Static arguments are part of the key under which a trace "
                    "is kept: pass a hashable value (a tuple instead of a list, a "
                    "frozen dataclass instead of a dict), or make the argument an "
                    "ordinary one."
                ) from None
        dynamic = [None if i in static else x for i, x in enumerate(args)]
        named = {name: x for name, x in kwargs.items() if name not in static}
        return static, dynamic, named


def static_spec(
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    argnames: str | Iterable[str],
) -> StaticSpec:
    """Check `static_argnums` and `static_argnames`, and make them one.

    An argument given by position is static when it is passed by name, and the other way
    around.

    Raises:
        StaticArgumentError: a position or a name that the function doesn't have, or
            something that is neither.
    """
    caller = f"remat.checkpoint({function_name(fun)})"
    nums = (argnums,) if isinstance(argnums, int) else argnums
    names = (argnames,) if isinstance(argnames, str) else argnames
    for what, values, kind in (
        ("static_argnums", nums, int),
        ("static_argnames", names, str),
    ):
        if not isinstance(values, Iterable) or any(
            not isinstance(v, kind) or isinstance(v, bool) for v in values
        ):
            raise StaticArgumentError(
                f"{caller} got {what}={values!r}. Pass "
                + (
                    "one position or a sequence of positions, as integers."
                    if kind is int
                    else "one argument name or several, as strings."
                )
            )
    positions, named = set(nums), set(names)
    parameters = _parameters(fun)
    if parameters is None:
        return StaticSpec(frozenset(positions), frozenset(named))
    positional = [
        p.name
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    takes_any_position = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    takes_any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    by_name = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} | {
        p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD
    }
    for n in tuple(positions):
        if not takes_any_position and not -len(positional) <= n < len(positional):
            raise StaticArgumentError(
                f"{caller} got static_argnums={argnums!r}, but the function takes "
                f"{len(positional)} positional arguments ({', '.join(positional)}), so "
                f"{n} is out of range. Positions count from 0."
            )
        if not takes_any_position and n < 0:
            positions.discard(n)
            positions.add(n + len(positional))
    for n in tuple(positions):
        if 0 <= n < len(positional) and positional[n] in by_name:
            named.add(positional[n])
    for name in names:
        if name in positional:
            positions.add(positional.index(name))
        elif name not in by_name and not takes_any_name:
            known = ", ".join(p.name for p in parameters)
            raise StaticArgumentError(
                f"{caller} got static_argnames={argnames!r}, but the function has no "
                f"argument {name!r}. Its arguments are {known}."
            )
    return StaticSpec(frozenset(positions), frozenset(named))


@dataclass(frozen=True, eq=False)
class TracedCall:
    """A function traced for one kind of arguments.

    Attributes:
        jaxpr: consts, then the flat dynamic arguments -> flat results.
        consts: what the function closed over.
        in_tree: the structure of its dynamic arguments, positional and by name.
        out_tree: the structure of its results.
        arg_names: how the user calls each flat argument, as in `params['w']`.
    """

    jaxpr: ClosedJaxpr
    consts: tuple[Any, ...]
    in_tree: TreeDef
    out_tree: TreeDef
    arg_names: tuple[str, ...]


# For each function, what it closed over when it was traced and its traces since.
_traces: weakref.WeakKeyDictionary[
    FunctionType, tuple[tuple[Any, ...], dict[Hashable, TracedCall]]
] = weakref.WeakKeyDictionary()


def trace_call(
    fun: Callable[..., Any],
    spec: StaticSpec,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[TracedCall, list[Any]]:
    """Trace `fun(*args, **kwargs)`, or find it traced; also the flat dynamic arguments.

    Raises:
        StaticArgumentError: a static argument can't be hashed.
        TracedValueError: the function needs the value of an argument in Python.
        UnsupportedError: an argument or a closed-over value can't be rematerialized.
    """
    static, dynamic, named = spec.split(fun, args, kwargs)
    leaves, in_tree = jax.tree.flatten((dynamic, named))
    avals = []
    for leaf in leaves:
        try:
            avals.append(jax.typeof(leaf))
        except TypeError:
            raise _not_an_array(fun, leaf, dynamic, named) from None
    kept = _kept_traces(fun)
    # Equal static values of different types (1, 1.0, True) are different arguments.
    static_key = tuple((where, type(x), x) for where, x in static.items())
    key = (static_key, in_tree, tuple(avals), trace_context())
    if kept is not None and key in kept:
        return kept[key], leaves
    call = _trace_anew(fun, static, in_tree, avals)
    if kept is not None and not any(isinstance(c, Tracer) for c in call.consts):
        kept[key] = call
    return call, leaves


def _trace_anew(
    fun: Callable[..., Any],
    static: Mapping[int | str, Any],
    in_tree: TreeDef,
    avals: Sequence[Any],
) -> TracedCall:
    positions = jax.tree.unflatten(in_tree, range(len(avals)))
    names = _argument_names(fun, *positions)
    out_tree: TreeDef | None = None

    def flat(*leaves: Any) -> list[Any]:
        nonlocal out_tree
        dynamic, named = jax.tree.unflatten(in_tree, leaves)
        args = [static.get(i, x) for i, x in enumerate(dynamic)]
        named |= {k: x for k, x in static.items() if isinstance(k, str)}
        results, out_tree = jax.tree.flatten(fun(*args, **named))
        return results

    for name, aval in zip(names, avals, strict=True):
        if is_ref(aval):
            raise _mutable(f"is given the mutable Ref {name}", fun)
    debug_info = DebugInfo("checkpoint", _source(fun), names, None)
    try:
        jaxpr, consts = trace(flat, avals, debug_info)
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerIntegerConversionError,
        jax.errors.TracerArrayConversionError,
    ) as error:
        raise _traced_value(fun, names, error) from error
    if any(is_ref(jax.typeof(c)) for c in consts):
        raise _mutable("closes over a mutable Ref", fun)
    if ref_effects(jaxpr):
        raise _mutable("reads or writes a mutable Ref", fun)
    assert out_tree is not None
    return TracedCall(flatten(jaxpr), tuple(consts), in_tree, out_tree, names)


def _kept_traces(fun: Callable[..., Any]) -> dict[Hashable, TracedCall] | None:
    """Where the traces of `fun` are kept; None where keeping them could be wrong."""
    if not isinstance(fun, FunctionType):
        return None
    closed_over = tuple(_contents(cell) for cell in fun.__closure__ or ())
    entry = _traces.get(fun)
    if entry is None or any(
        a is not b for a, b in zip(entry[0], closed_over, strict=True)
    ):
        if any(isinstance(x, Tracer) for x in closed_over):
            return None  # keeping it would keep the tracer alive, for no later use
        entry = _traces[fun] = (closed_over, {})
    return entry[1]


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def function_name(fun: Callable[..., Any]) -> str:
    """What to call `fun` in a message."""
    while isinstance(fun, partial):
        fun = fun.func
    return getattr(fun, "__name__", None) or type(fun).__name__


def argument_name(fun: Callable[..., Any], where: int | str) -> str:
    """What the user calls the argument at a position, or of a name."""
    if isinstance(where, str):
        return where
    parameters = _parameters(fun) or []
    positional = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)
    ]
    for i, p in enumerate(positional):
        if p.kind is p.VAR_POSITIONAL:
            return f"{p.name}[{where - i}]"
        if i == where:
            return p.name
    return f"number {where}"


def _argument_names(
    fun: Callable[..., Any], dynamic: Sequence[Any], named: Mapping[str, Any]
) -> tuple[str, ...]:
    trees = [
        *((argument_name(fun, i), x) for i, x in enumerate(dynamic)),
        *((name, named[name]) for name in sorted(named)),
    ]
    return tuple(
        name + keystr(path)
        for name, tree in trees
        for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]
    )


def _parameters(fun: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # some callables written in C
        return None


def _source(fun: Callable[..., Any]) -> str:
    """`name at file:line`, the form that JAX reads in its own messages."""
    inner = inspect.unwrap(fun)
    while isinstance(inner, partial):
        inner = inner.func
    code = getattr(inner, "__code__", None)
    name = function_name(fun)
    return f"{name} at {code.co_filename}:{code.co_firstlineno}" if code else name


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _not_an_array(
    fun: Callable[..., Any], leaf: Any, dynamic: Sequence[Any], named: Mapping[str, Any]
) -> UnsupportedError:
    names = _argument_names(fun, dynamic, named)
    leaves = jax.tree.leaves((dynamic, named))
    name = next(n for n, x in zip(names, leaves, strict=True) if x is leaf)
    root = name.split("[")[0].split(".")[0]
    return UnsupportedError(
        f"The argument {name} of {function_name(fun)} is {_shown(leaf)} of type "
        f"{type(leaf).__name__}, which JAX can't trace. Mark it static: "
        f"remat.checkpoint({function_name(fun)}, static_argnames={root!r})."
    )


def _mutable(what: str, fun: Callable[..., Any]) -> UnsupportedError:
    return UnsupportedError(
        f"The function {_source(fun)}, given to remat.checkpoint, {what}. A recomputed "
        "read would see the value as it is by then, not as it was, and a recomputed "
        "write would happen twice. Pass the Ref's value instead (ref[...]) and write "
        "the result back outside of the checkpointed function."
    )


def _traced_value(
    fun: Callable[..., Any], names: Sequence[str], error: Exception
) -> TracedValueError:
    """Say which argument it was; JAX's message has it, in its own words."""
    text = str(error)
    _, marker, after = text.partition("depends on the value")
    tail = after.split("\n")[0] if marker else ""
    guilty = [n for n in names if f" {n}." in f"{tail}." or f" {n}," in tail]
    if not guilty:
        guilty = [n for n in names if n in tail.replace(",", " ").split()]
    roots = list(dict.fromkeys(n.split("[")[0].split(".")[0] for n in guilty or names))
    which = (
        f"the value of the argument{'s' if len(guilty) > 1 else ''} {', '.join(guilty)}"
        if guilty
        else f"a value computed from its arguments ({', '.join(names)})"
    )
    shown = repr(roots[0]) if len(roots) == 1 else repr(tuple(roots))
    return TracedValueError(
        f"The function {_source(fun)}, given to remat.checkpoint, needs {which} in "
        "Python (in an `if`, a shape or an index), but it is traced, so it has none. "
        "If it is a flag or a size rather than data, make it static: "
        f"remat.checkpoint({function_name(fun)}, static_argnames={shown}), or "
        "static_argnums with its position. If it is data, use jax.lax.cond or "
        "jnp.where."
    )
