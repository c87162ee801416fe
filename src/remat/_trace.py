"""Tracing a Python function to a program, once for each kind of arguments.

A trace is kept for as long as the function lives and is used again for arguments of
the same types. It is not where that could be wrong: where it closed over a tracer,
where the function is a method or another object that may have changed, or where
something that it reads besides its arguments is no longer the same.
"""

import re
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import keystr, tree_leaves_with_path

from remat._arguments import (
    StaticSpec,
    closing_over,
    flat_arguments,
    function_name,
    is_hashable,
    shown,
    source,
    static_remedy,
)
from remat._errors import TracedValueError, UnsupportedError, mutable_ref_error
from remat._flatten import trace_flat
from remat._jax import ClosedJaxpr, DebugInfo, is_ref, ref_effects, trace_context

# The class of `jax.tree.structure(x)` is no type to a type checker.
TreeDef = Any


@dataclass(frozen=True, eq=False)
class TracedCall:
    """A function traced for one kind of arguments.

    Attributes:
        jaxpr: consts, then the flat dynamic arguments -> flat results.
        consts: what the function closed over.
        in_tree: the structure of its dynamic arguments, positional and by name; None
            stands for static positions.
        static_positions: where those are.
        out_tree: the structure of its results.
        arg_names: how the user calls each flat argument, as in `params['w']`.
    """

    jaxpr: ClosedJaxpr
    consts: tuple[Any, ...]
    in_tree: TreeDef
    static_positions: frozenset[int]
    out_tree: TreeDef
    arg_names: tuple[str, ...]


@dataclass(eq=False)
class _Kept:
    """The traces of a function, and what it read when they were made.

    They are an attribute of the function rather than in a table of ours, so that the
    garbage collector sees cycles: a trace may hold what holds the function. `owner`
    tells whether `functools.wraps` copied the attribute to another function.
    """

    owner: weakref.ref[Any]
    reads: tuple[Any, ...]
    traces: dict[Hashable, TracedCall]


_CHECKPOINT = "remat.checkpoint"
_NEEDS_VALUE = "depends on the value"
_KEPT = "__remat_traces__"


def trace_call(
    fun: Callable[..., Any],
    spec: StaticSpec,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    caller: str = _CHECKPOINT,
) -> tuple[TracedCall, list[Any]]:
    """Trace `fun(*args, **kwargs)`, or find it traced; also the flat dynamic arguments.

    Errors tell that `fun` was given to `caller`, and what works there.

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
        except (TypeError, OverflowError):
            raise _not_an_array(fun, leaf, dynamic, named, caller) from None
    kept = _kept_traces(fun)
    # Equal static values of different types (1, 1.0, True) are different arguments.
    static_key = tuple((where, _typed(x)) for where, x in static.items())
    key = (static_key, in_tree, tuple(avals), trace_context())
    if kept is not None and key in kept.traces:
        return kept.traces[key], leaves
    call = _trace_anew(fun, static, in_tree, avals, caller)
    reads = _reads(fun)  # after tracing, which may count itself in a variable
    if reads is not None and not any(
        isinstance(x, Tracer) for x in (*call.consts, *reads)
    ):
        if kept is None:
            kept = _Kept(weakref.ref(fun), reads, {})
            setattr(fun, _KEPT, kept)
        kept.reads = reads
        kept.traces[key] = call
    return call, leaves


def _trace_anew(
    fun: Callable[..., Any],
    static: Mapping[int | str, Any],
    in_tree: TreeDef,
    avals: Sequence[Any],
    caller: str,
) -> TracedCall:
    args, kwargs = jax.tree.unflatten(in_tree, range(len(avals)))
    names = tuple(argument.path for argument in flat_arguments(fun, args, kwargs))
    out_tree: TreeDef | None = None

    def flat(*leaves: Any) -> list[Any]:
        nonlocal out_tree
        dynamic, named = jax.tree.unflatten(in_tree, leaves)
        positional = [static.get(i, x) for i, x in enumerate(dynamic)]
        named |= {k: x for k, x in static.items() if isinstance(k, str)}
        result = fun(*positional, **named)
        _check_results(fun, result, caller)
        results, out_tree = jax.tree.flatten(result)
        return results

    for name, aval in zip(names, avals, strict=True):
        if is_ref(aval):
            raise mutable_ref_error(source(fun), f"is given the mutable Ref {name}")
    debug_info = DebugInfo("checkpoint", source(fun), names, None)
    try:
        jaxpr, consts = trace_flat(flat, avals, debug_info)
    except TypeError as error:
        # Most are subclasses of their own; a shape that is traced is a bare TypeError.
        if _NEEDS_VALUE not in str(error):
            raise
        raise _traced_value(fun, args, kwargs, caller, error) from error
    except jax.errors.NonConcreteBooleanIndexError as error:
        raise TracedValueError(
            f"The function {source(fun)}, given to {caller}, indexes with a mask that "
            "is traced, so the size of the result isn't known. Use jnp.where(mask, x, "
            "fill) to keep the size, or jnp.nonzero with size=."
        ) from error
    if any(is_ref(jax.typeof(c)) for c in consts):
        raise mutable_ref_error(source(fun), "closes over a mutable Ref")
    if ref_effects(jaxpr):
        raise mutable_ref_error(source(fun), "reads or writes a mutable Ref")
    assert out_tree is not None
    return TracedCall(
        jaxpr,
        tuple(consts),
        in_tree,
        frozenset(where for where in static if isinstance(where, int)),
        out_tree,
        names,
    )


def _reads(fun: Callable[..., Any]) -> tuple[Any, ...] | None:
    """What `fun` reads besides its arguments: closure, globals, defaults.

    Containers and plain objects are followed by one level, closed-over functions into
    their closures. None for a callable that may keep its state anywhere else.
    """
    while isinstance(fun, partial):
        fun = fun.func
    if not isinstance(fun, FunctionType):
        return None
    names = _global_names(fun.__code__)
    read = [fun.__globals__[name] for name in names if name in fun.__globals__]
    read += [*(fun.__defaults__ or ()), *(fun.__kwdefaults__ or {}).values()]
    seen: set[int] = set()
    functions = [fun]
    while functions:
        closure = functions.pop().__closure__ or ()
        for cell in closure:
            if id(cell) in seen:
                continue
            seen.add(id(cell))
            try:
                read.append(cell.cell_contents)
            except ValueError:  # not bound yet
                continue
            if isinstance(read[-1], FunctionType):
                functions.append(read[-1])
    inside = [x for value in read for x in _inside(value)]
    return (*read, *inside)


@lru_cache(maxsize=1024)
def _global_names(code: CodeType) -> tuple[str, ...]:
    inner = (c for c in code.co_consts if isinstance(c, CodeType))
    return (*code.co_names, *(name for c in inner for name in _global_names(c)))


def _inside(value: Any) -> Iterable[Any]:
    match value:
        case dict():
            return (*value.keys(), *value.values())
        case list() | tuple() | set() | frozenset():
            return tuple(value)
        case type() | ModuleType() | FunctionType() | jax.Array():
            return ()
        case _:
            return tuple(getattr(value, "__dict__", {}).values())


def _kept_traces(fun: Callable[..., Any]) -> _Kept | None:
    """The traces of `fun` that were made when it read the same values as now."""
    kept = getattr(fun, _KEPT, None)
    if not isinstance(kept, _Kept) or kept.owner() is not fun:
        return None
    reads = _reads(fun)
    if reads is None or len(kept.reads) != len(reads):
        return None
    if any(a is not b for a, b in zip(kept.reads, reads, strict=True)):
        return None
    return kept


def _typed(value: Any) -> Hashable:
    """A key that tells 1 from True and from 1.0, in tuples too."""
    if isinstance(value, tuple):
        return type(value), tuple(_typed(x) for x in value)
    if isinstance(value, frozenset):
        return type(value), frozenset(_typed(x) for x in value)
    return type(value), value


def _check_results(fun: Callable[..., Any], result: Any, caller: str) -> None:
    for path, leaf in tree_leaves_with_path(result):
        try:
            aval = jax.typeof(leaf)
        except TypeError:
            to_do = (
                "return what is none outside of the checkpointed function."
                if caller == _CHECKPOINT
                else "leave out what is none."
            )
            raise UnsupportedError(
                f"The function {source(fun)}, given to {caller}, returned "
                f"{shown(leaf)} of type {type(leaf).__name__} as result{keystr(path)}. "
                f"It has to return arrays, or containers of arrays; {to_do}"
            ) from None
        if is_ref(aval):
            what = f"returned a mutable Ref as result{keystr(path)}"
            raise mutable_ref_error(source(fun), what)


def _not_an_array(
    fun: Callable[..., Any],
    leaf: Any,
    dynamic: Sequence[Any],
    named: Mapping[str, Any],
    caller: str,
) -> UnsupportedError:
    arguments = flat_arguments(fun, dynamic, named)
    leaves = jax.tree.leaves((dynamic, named))
    argument = next(a for a, x in zip(arguments, leaves, strict=True) if x is leaf)
    where = argument.where
    whole = dynamic[where] if isinstance(where, int) else named[where]
    if caller != _CHECKPOINT:
        remedy = (
            f"Close over it: {_called(fun, [where], dynamic, named, caller)}."
            if whole is leaf
            else "Leave it out of the argument, and close over it."
        )
    elif is_hashable(whole):
        remedy = (
            f"Mark it static: {caller}({function_name(fun)}, "
            f"{static_remedy(fun, [where])})."
        )
    elif is_hashable(leaf):
        remedy = (
            "Pass it as an argument of its own and mark that static, or close over it."
        )
    else:
        is_array = isinstance(leaf, np.ndarray)
        remedy = (
            "Nor can it be static, since it can't be hashed. "
            f"{'Pass an array of numbers' if is_array else 'Convert it to an array'}, "
            "or close over it."
        )
    return UnsupportedError(
        f"The argument {argument.path} of {function_name(fun)} is {shown(leaf)} of "
        f"type {type(leaf).__name__}, which JAX can't trace. {remedy}"
    )


def _called(
    fun: Callable[..., Any],
    wheres: Iterable[int | str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    caller: str,
) -> str:
    """The call of `caller` with a function that closes over what is at `wheres`."""
    function, taken = closing_over(fun, args, kwargs, wheres)
    return f"{caller}({', '.join(filter(None, [function, taken]))})"


def _traced_value(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    caller: str,
    error: Exception,
) -> TracedValueError:
    """Say which argument it was; JAX's message has it, in its own words."""
    text = str(error)
    where = re.search(r"tracing the function (.+?) for (\w+)", text)
    ours = where is not None and where.groups() == (source(fun), "checkpoint")
    described = re.search(_NEEDS_VALUE + r"s? of (?:the argument)?s?(.+)", text)
    words = described[1] if described else ""
    guilty = [
        a
        for a in flat_arguments(fun, args, kwargs)
        if ours and re.search(rf"(?<![\w\].]){re.escape(a.path)}(?![\w\[])", words)
    ]
    start = f"The function {source(fun)}, given to {caller}, needs "
    reason = "in Python (in an `if`, a shape or an index), but it is traced, so it has"
    if not guilty:
        inner = "" if ours or where is None else f" (in {where[1]}, which it calls)"
        remedy = (
            "make that an argument and static, with static_argnames or static_argnums"
            if caller == _CHECKPOINT
            else "close over that"
        )
        return TracedValueError(
            f"{start}the value of something that it closes over or computes{inner} "
            f"{reason} none. If it comes from a flag or a size, {remedy}. If it is "
            f"data, use jax.lax.cond or jnp.where. JAX says: {text}"
        )
    names = ", ".join(a.path for a in guilty)
    plural = "s" if len(guilty) > 1 else ""
    wheres = dict.fromkeys(a.where for a in guilty)
    if caller == _CHECKPOINT:
        remedy = static_remedy(fun, wheres)
        remedy = f"make it static: {caller}({function_name(fun)}, {remedy})" + (
            ""
            if "static_argnums" in remedy
            else ", or static_argnums with its position"
        )
    else:
        remedy = f"close over it: {_called(fun, wheres, args, kwargs, caller)}"
    return TracedValueError(
        f"{start}the value of the argument{plural} {names} {reason} none. "
        f"If it is a flag or a size rather than data, {remedy}. "
        "If it is data, use jax.lax.cond or jnp.where."
    )
