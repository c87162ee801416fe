"""Which values of a program a policy saves, and the slice that recomputes the others.

Walking back from the values that are wanted, and stopping at operands and at values
that the policy lets us save, gives the saved values and, on the way, the equations that
make what is wanted from those. An equation that evaluates a program of its own (a loop,
a branch, a nested checkpoint) is opened: what is saved inside of it becomes a result of
it, and the slice has an equation of its kind that starts from there
(`remat._control_flow`).
"""

from collections.abc import Callable, Iterable
from functools import partial

from jax.extend.core import Var, jaxprs_in_params
from jax.extend.core.primitives import cond_p, scan_p

from remat._constants import holds_constants
from remat._control_flow.cond import cond_split
from remat._control_flow.nested import (
    call_split,
    is_opened,
    remat_split,
    result_split,
)
from remat._control_flow.parts import Parts, Save, Saved
from remat._control_flow.scan import scan_split
from remat._control_flow.shard_map import shard_map_split
from remat._jax import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    call_with_rule,
    is_shard_map,
    name_p,
    rewritable_call,
)
from remat._policies import Policy, asks


def save(program: ClosedJaxpr, wanted: Iterable[Var], policy: Policy) -> Saved:
    """What to save of `program` so that the values `wanted` can be had again.

    `checkpoint_name` makes a copy under a name. Where the copy may be saved it also
    stands for the value itself: `y = checkpoint_name(tanh(x), "y")` saves the tanh,
    though the derivative of tanh reads the value from before it was named.
    """
    wanted = tuple(wanted)
    eqns = list(program.eqns)
    copy_of = _named_copies(eqns, policy)
    made = {v for eqn in eqns for v in eqn.outvars}
    needed: set[Var] = set()
    saved: set[Var] = set()
    stands_for: dict[Var, Var] = {}
    recomputed: list[JaxprEqn] = []

    def need(atoms: Iterable[Var | Literal]) -> None:
        for v in atoms:
            if isinstance(v, Literal) or v in saved:
                continue
            copy = copy_of(v)
            if copy is v:
                needed.add(v)
                continue
            stands_for[v] = copy
            if copy in made:
                saved.add(copy)

    need(wanted)
    split = partial(save, policy=policy)
    # Whatever reads the results of an equation comes after it.
    for i in reversed(range(len(eqns))):
        eqn = eqns[i]
        asked = [v for v in eqn.outvars if v in needed and v not in saved]
        if not asked:
            continue
        parts = _split(eqn, asked, policy, split)
        eqns[i] = parts.known
        saved.update(parts.saved)
        if parts.recomputed is not None:
            recomputed.append(parts.recomputed)
            need(parts.recomputed.invars)
    recomputed.reverse()
    return Saved(
        tuple(eqns),
        tuple(v for eqn in eqns for v in eqn.outvars if v in saved),
        tuple(renamed(eqn, stands_for) for eqn in recomputed),
        stands_for,
        frozenset(wanted),
    )


def _split(eqn: JaxprEqn, wanted: list[Var], policy: Policy, split: Save) -> Parts:
    if is_opened(eqn):
        return remat_split(eqn, wanted, split)
    if eqn.primitive is scan_p and not holds_constants(eqn):
        return scan_split(eqn, wanted, split, policy)
    if eqn.primitive is cond_p and not holds_constants(eqn):
        return cond_split(eqn, wanted, split)
    if is_shard_map(eqn):
        return shard_map_split(eqn, wanted, split)
    if asks(policy, eqn):
        return Parts(eqn, tuple(wanted), None)
    program = rewritable_call(eqn)
    if program is not None and not program.consts:
        return call_split(eqn, program, wanted, split)
    program = call_with_rule(eqn)
    if program is not None and not program.consts:
        return result_split(eqn, program, wanted, split)
    return Parts(eqn, (), eqn)


def renamed(eqn: JaxprEqn, names: dict[Var, Var]) -> JaxprEqn:
    """`eqn` with what it reads called by other names."""
    if not any(isinstance(v, Var) and v in names for v in eqn.invars):
        return eqn
    return eqn.replace(
        invars=[names.get(v, v) if isinstance(v, Var) else v for v in eqn.invars]
    )


def _named_copies(eqns: Iterable[JaxprEqn], policy: Policy) -> Callable[[Var], Var]:
    """A map from each value to what is saved in its place, often the value itself."""
    original: dict[Var, Var] = {}  # what a named value is a copy of
    copies: dict[Var, Var] = {}  # for an original, its first copy that may be saved
    made: set[Var] = set()
    for eqn in eqns:
        made.update(eqn.outvars)
        if eqn.primitive is name_p and isinstance(source := eqn.invars[0], Var):
            root = original[eqn.outvars[0]] = original.get(source, source)
            if root not in made:
                copies[root] = root  # an operand is there in any case
            elif root not in copies and asks(policy, eqn):
                copies[root] = eqn.outvars[0]
    return lambda v: copies.get(original.get(v, v), v)


def names_in(eqns: Iterable[JaxprEqn]) -> frozenset[str]:
    """The names that `checkpoint_name` gave to values in `eqns`, at any depth."""
    found: set[str] = set()
    for eqn in eqns:
        if eqn.primitive is name_p:
            found.add(eqn.params["name"])
        for inner in jaxprs_in_params(eqn.params):
            found |= names_in(inner.eqns)
    return frozenset(found)
