"""What a policy makes of a program, and of an equation that evaluates one.

A program falls into what is saved of it and a slice that starts from there. For an
equation that evaluates a program of its own (a loop, a branch, a nested checkpoint)
that becomes an equation that also returns what is saved inside of it, and one of its
kind that evaluates the slice.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import DropVar, Var

from remat._jax import ClosedJaxpr, JaxprEqn, Literal, build_jaxpr

Atom = Var | Literal


@dataclass(frozen=True, eq=False)
class Saved:
    """What is saved of a program, and how what was wanted of it is made from that.

    Attributes:
        eqns: the equations of the program, some of which return more than before.
        values: what of their results is saved, in order.
        recomputed: equations that make what was wanted from `values` and operands.
        stands_for: for values that a saved copy stands for, that copy.
        wanted: what was wanted.
    """

    eqns: tuple[JaxprEqn, ...]
    values: tuple[Var, ...]
    recomputed: tuple[JaxprEqn, ...]
    stands_for: dict[Var, Var]
    wanted: frozenset[Var]

    def copy(self, atom: Atom) -> Atom:
        """What stands for `atom` among the saved values and in the slice."""
        return self.stands_for.get(atom, atom) if isinstance(atom, Var) else atom

    def keeps(self, atom: Atom) -> bool:
        """Whether `atom` is saved."""
        copy = self.copy(atom)
        return isinstance(copy, Var) and copy in self.values

    def positions(self, results: Sequence[Atom]) -> dict[Var, int]:
        """Where each value is among `results`."""
        copies = [self.copy(atom) for atom in results]
        return {v: i for i, v in enumerate(copies) if isinstance(v, Var)}

    def reads(self, results: Iterable[Atom]) -> set[Var]:
        """What the slice reads, if it returns `results`."""
        copies = (self.copy(atom) for atom in results)
        return variables((*(v for e in self.recomputed for v in e.invars), *copies))

    def extended(self, program: ClosedJaxpr, added: Sequence[Var]) -> ClosedJaxpr:
        """`program`, returning the saved values `added` too."""
        same = all(a is b for a, b in zip(self.eqns, program.eqns, strict=True))
        if same and not added:
            return program
        jaxpr = program.jaxpr
        outvars = [*jaxpr.outvars, *added]
        return build_jaxpr(jaxpr.invars, outvars, self.eqns, like=jaxpr)


# Saves values of a program so that the given ones can be had again.
Save = Callable[[ClosedJaxpr, Iterable[Var]], Saved]


@dataclass(frozen=True, eq=False)
class Parts:
    """An equation taken apart.

    Attributes:
        known: the equation, with what is saved inside of it as further results.
        saved: which of its results are saved.
        recomputed: what makes the results that are wanted and not saved, if any.
    """

    known: JaxprEqn
    saved: tuple[Var, ...]
    recomputed: JaxprEqn | None


class Results:
    """The results of an equation that is to return more than before."""

    def __init__(self, eqn: JaxprEqn):
        self.outvars: list[Var] = list(eqn.outvars)

    def at(self, position: int) -> Var:
        """The result at `position`, which may have been dropped so far."""
        if isinstance(self.outvars[position], DropVar):
            self.outvars[position] = Var(self.outvars[position].aval)
        return self.outvars[position]

    def add(self, aval: Any) -> Var:
        """One result more, of type `aval`."""
        self.outvars.append(Var(aval))
        return self.outvars[-1]


def variables(atoms: Iterable[Atom]) -> set[Var]:
    """Those of `atoms` that are no literals."""
    return {v for v in atoms if isinstance(v, Var)}


def partition(
    values: Iterable[Any], condition: Callable[[Any], bool]
) -> tuple[list[Any], list[Any]]:
    """The values for which a condition holds, and the others."""
    yes: list[Any] = []
    no: list[Any] = []
    for value in values:
        (yes if condition(value) else no).append(value)
    return yes, no
