"""Writing a jaxpr again: its equations in any order, some repeatedly, with barriers."""

from collections.abc import Sequence

from jax.extend.core import DropVar, Var
from jax.lax import optimization_barrier_p

from remat._jax import ClosedJaxpr, JaxprEqn, Literal, build_jaxpr, new_equation


class Emitter:
    """A jaxpr in the making, with the operands and results of the one given.

    Everything reads the latest version of a value: what came out of its last evaluation
    or, after that, of the last barrier that it was tied in.
    """

    def __init__(self, jaxpr: ClosedJaxpr):
        self._given = jaxpr
        self._latest: dict[Var, Var] = {}
        self._evaluated: set[int] = set()
        self._eqns: list[JaxprEqn] = []

    def evaluate(self, i: int) -> JaxprEqn:
        """Write equation `i` of the given jaxpr next; returns that equation."""
        eqn = self._given.eqns[i]
        outvars = eqn.outvars
        if i in self._evaluated:  # a jaxpr must not define a variable twice
            outvars = [type(v)(v.aval) for v in eqn.outvars]
        self._evaluated.add(i)
        invars = [self._read(v) for v in eqn.invars]
        self._eqns.append(eqn.replace(invars=invars, outvars=outvars))
        self._latest.update(
            (v, new)
            for v, new in zip(eqn.outvars, outvars, strict=True)
            if not isinstance(v, DropVar)
        )
        return eqn

    def barrier(self, tied: Sequence[Var], *, like: JaxprEqn) -> None:
        """Write a barrier that ties these values, at the place of `like`."""
        operands = [self._read(v) for v in tied]
        outs = [Var(v.aval) for v in tied]
        self._eqns.append(
            new_equation(optimization_barrier_p, operands, outs, {}, like=like)
        )
        self._latest.update(zip(tied, outs, strict=True))

    def finish(self) -> ClosedJaxpr:
        """The jaxpr that was written."""
        jaxpr = self._given.jaxpr
        outvars = [self._read(v) for v in jaxpr.outvars]
        return build_jaxpr(jaxpr.invars, outvars, self._eqns, like=jaxpr)

    def _read(self, atom: Var | Literal) -> Var | Literal:
        return atom if isinstance(atom, Literal) else self._latest.get(atom, atom)
