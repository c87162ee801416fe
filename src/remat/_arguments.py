"""The arguments of a function: what they are called, and which are static."""

import inspect
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from jax.core import Tracer
from jax.tree_util import keystr, tree_flatten_with_path

from remat._errors import StaticArgumentError


@dataclass(frozen=True)
class Argument:
    """One array among the arguments of a call.

    Attributes:
        where: the position of the argument it belongs to, or its keyword.
        path: what the user calls the array, as in `params['w']`.
    """

    where: int | str
    path: str


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


def flat_arguments(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Argument, ...]:
    """The arrays in `args` and `kwargs`, in the order of `jax.tree.leaves`."""
    trees = [*enumerate(args), *((name, kwargs[name]) for name in sorted(kwargs))]
    return tuple(
        Argument(where, argument_name(fun, where) + keystr(path))
        for where, tree in trees
        for path, _ in tree_flatten_with_path(tree)[0]
    )


def static_remedy(fun: Callable[..., Any], wheres: Iterable[int | str]) -> str:
    """The keyword arguments of `checkpoint` that make the arguments at `wheres` static.

    Those of `*args` have no names.
    """
    by_name = {p.name for p in _parameters(fun) or () if p.kind is not p.VAR_POSITIONAL}
    nums, names = [], []
    for where in dict.fromkeys(wheres):
        name = argument_name(fun, where)
        if isinstance(where, str) or name in by_name:
            names.append(name)
        else:
            nums.append(where)
    return ", ".join(
        f"{keyword}={(values[0] if len(values) == 1 else tuple(values))!r}"
        for keyword, values in (("static_argnums", nums), ("static_argnames", names))
        if values
    )


def closing_over(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    wheres: Iterable[int | str],
) -> tuple[str, str]:
    """A lambda that calls `fun` and closes over the arguments at `wheres`.

    Also the other arguments, which it takes: the two as one writes them in a call.
    """
    names = {i: argument_name(fun, i) for i in range(len(args))}
    names = {i: n if n.isidentifier() else f"x{i}" for i, n in names.items()}
    closed = set(wheres)
    given = [n for i, n in names.items() if i not in closed]
    given += [name for name in kwargs if name not in closed]
    passed = ", ".join([*names.values(), *(f"{name}={name}" for name in kwargs)])
    function = function_name(fun)
    function = function if function.isidentifier() else "fun"
    taken = ", ".join(given)
    return f"lambda{' ' * bool(given)}{taken}: {function}({passed})", taken


def _parameters(fun: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # some callables written in C
        return None


def source(fun: Callable[..., Any]) -> str:
    """`name at file:line`, the form that JAX reads in its own messages."""
    inner = inspect.unwrap(fun)
    while isinstance(inner, partial):
        inner = inner.func
    code = getattr(inner, "__code__", None)
    name = function_name(fun)
    return f"{name} at {code.co_filename}:{code.co_firstlineno}" if code else name


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class StaticSpec:
    """Which arguments of a function are static, by position and by name."""

    positions: frozenset[int]
    names: frozenset[str]
    num_named: int = 0
    """How many positional parameters have a name of their own."""

    def after(self, num_given: int) -> "StaticSpec":
        """The same once the first `num_given` positional arguments are given."""
        return StaticSpec(
            frozenset(
                p - num_given if p >= 0 else p
                for p in self.positions
                if not 0 <= p < num_given
            ),
            self.names,
            max(self.num_named - num_given, 0),
        )

    def split(
        self, fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[dict[int | str, Any], list[Any], dict[str, Any]]:
        """The static arguments, then the others; None stands for static positions.

        Raises:
            StaticArgumentError: a static argument can't be hashed, or the call has none
                at its position.
        """
        positions = set()
        for p in self.positions:
            if not -len(args) <= p < max(len(args), self.num_named):
                raise StaticArgumentError(
                    f"{function_name(fun)} was called with {len(args)} positional "
                    f"arguments, and static_argnums={p} is out of their range. "
                    "Positions count from 0."
                )
            positions.add(p % len(args) if p < 0 else p)
        static: dict[int | str, Any] = {
            i: x for i, x in enumerate(args) if i in positions
        }
        static |= {name: x for name, x in kwargs.items() if name in self.names}
        for where, value in static.items():
            label = argument_name(fun, where)
            if isinstance(value, Tracer):
                raise StaticArgumentError(
                    f"The static argument {label} of {function_name(fun)} is a value "
                    f"that is traced, {shown(value)}: it is an argument of a function "
                    "around the call that jax.jit, jax.grad, remat.saved_residuals or "
                    "the like was applied to. Make it static there too, or close over "
                    "it instead."
                )
            if not is_hashable(value):
                raise StaticArgumentError(
                    f"The static argument {label} of {function_name(fun)} is "
                    f"{shown(value)} of type {type(value).__name__}, which can't be "
                    "hashed. Static arguments are part of the key under which a trace "
                    "is kept: pass a hashable value (a tuple instead of a list, a "
                    "frozen dataclass instead of a dict), or make the argument an "
                    "ordinary one."
                )
        dynamic = [None if i in static else x for i, x in enumerate(args)]
        named = {name: x for name, x in kwargs.items() if name not in static}
        return static, dynamic, named


# What is static in each function that `checkpoint` returned, while that lives. As an
# attribute it would be copied to other functions by `functools.wraps`.
_DECLARED: weakref.WeakKeyDictionary[Callable[..., Any], StaticSpec]
_DECLARED = weakref.WeakKeyDictionary()


def declare(fun: Callable[..., Any], spec: StaticSpec) -> None:
    """Remember that calls of `fun` have the static arguments of `spec`."""
    _DECLARED[fun] = spec


def declared_spec(fun: Callable[..., Any]) -> StaticSpec | None:
    """What was declared for `fun`, or for the function that it is a method or part of.

    None if nothing was.
    """
    match fun:
        case FunctionType():
            return _DECLARED.get(fun)
        case MethodType():
            spec, num_given = declared_spec(fun.__func__), 1
        case partial():
            spec, num_given = declared_spec(fun.func), len(fun.args)
        case _:
            return None
    return None if spec is None else spec.after(num_given)


def is_hashable(value: object) -> bool:
    """Whether `value` can be a static argument: it hashes, and so do its parts."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


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
    nums = _indices(argnums)
    if nums is None:
        raise StaticArgumentError(
            f"{caller} got static_argnums={argnums!r}. Pass one position or a sequence "
            "of positions, as integers."
        )
    names = (argnames,) if isinstance(argnames, str) else argnames
    if not isinstance(names, Iterable) or not all(isinstance(n, str) for n in names):
        raise StaticArgumentError(
            f"{caller} got static_argnames={argnames!r}. Pass one argument name or "
            "several, as strings."
        )
    names = tuple(names)
    if not nums and not names:
        return StaticSpec(frozenset(), frozenset())
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
    return StaticSpec(frozenset(positions), frozenset(named), len(positional))


def _indices(argnums: Any) -> tuple[int, ...] | None:
    """`argnums` as integers; None if some are none. A bool is no position."""
    values = argnums if isinstance(argnums, list | tuple | set | range) else (argnums,)
    if any(isinstance(v, bool) for v in values):
        return None
    try:
        return tuple(operator.index(v) for v in values)
    except TypeError:
        return None
