"""A jaxpr as a planner's program: one step for what a compiler evaluates as one kernel.

A value that is only read within the kernel that makes it takes no memory. So an
equation that compilers fuse with its only use is part of that use; views and broadcasts
are part of each of theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend.core import DropVar, Var

from remat._cost import Rates, work
from remat._emit import Emitter
from remat._jax import ClosedJaxpr, JaxprEqn, num_bytes, side_effects
from remat._program import Program
from remat._schedule import behind_barriers
from remat._simulate import Simulation
from remat._stage import CHEAP

# What changes only how the same bytes are seen.
_VIEWS = frozenset(["reshape", "squeeze", "expand_dims", "name", "stop_gradient"])
# What reads fewer bytes than it makes, and is evaluated again in each use.
_EXPANDING = frozenset(["broadcast_in_dim", "iota"])
_REDUCTIONS = frozenset(
    [f"reduce_{x}" for x in ("sum", "max", "min", "prod", "and", "or", "xor")]
)
_FUSED_MOVES = frozenset(
    ["transpose", "slice", "pad", "rev", "concatenate", "dynamic_slice"]
)
_FUSING = CHEAP | _REDUCTIONS | _FUSED_MOVES


@dataclass(frozen=True, eq=False)
class FusedProgram:
    """A program, and what its steps are in the jaxpr.

    Attributes:
        program: what to plan.
        jaxpr: the jaxpr it stands for.
        groups: for each equation of `program`, those of the jaxpr that it evaluates,
            in order. One that compilers evaluate again in each use is in many.
        values: for each value of `program`, the variable.
    """

    program: Program
    jaxpr: ClosedJaxpr
    groups: tuple[tuple[int, ...], ...]
    values: tuple[Var, ...]


def fused(jaxpr: ClosedJaxpr, rates: Rates) -> FusedProgram:
    """`jaxpr`, which has no dead equations, as a program with times in seconds."""
    eqns = jaxpr.eqns
    results = {v for v in jaxpr.jaxpr.outvars if isinstance(v, Var)}
    inlined = _inlined(eqns, results)
    maker = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}

    groups, reads, makes, costs, again = [], [], [], [], []
    number: dict[Var, int] = {}
    values: list[Var] = []
    sizes: list[int] = []
    for i, eqn in enumerate(eqns):
        if inlined[i]:
            continue
        members, external = _members(i, eqns, maker, inlined)
        made = [v for v in eqn.outvars if not isinstance(v, DropVar)]
        for v in made:
            number[v] = len(values)
            values.append(v)
            # Results have buffers of their own, which no plan can free.
            sizes.append(0 if v in results else _size(v))
        groups.append(tuple(members))
        reads.append(tuple(number[v] for v in external if v in number))
        makes.append(tuple(number[v] for v in made))
        inside = [eqns[k] for k in members]
        amount = work(inside, [v.aval for v in external], [v.aval for v in made])
        costs.append(amount.seconds(rates))
        again.append(not any(map(_once, inside)))
    program = Program(
        reads=tuple(reads),
        makes=tuple(makes),
        value_bytes=tuple(sizes),
        costs=tuple(costs),
        results=tuple(number[v] for v in dict.fromkeys(results) if v in number),
        repeatable=tuple(again),
    )
    return FusedProgram(program, jaxpr, tuple(groups), tuple(values))


def rewritten(fused_program: FusedProgram, sim: Simulation) -> ClosedJaxpr:
    """The jaxpr, evaluated as in a simulated schedule of its program."""
    jaxpr, program = fused_program.jaxpr, fused_program.program
    emitter = Emitter(jaxpr)
    operands = set(jaxpr.jaxpr.invars)
    written_after: dict[int, int] = {}  # how many barriers there were
    barriers = 0
    for group in behind_barriers(sim):
        if group.late:
            tied = [fused_program.values[v] for v in (*group.settled, *group.inputs)]
            # What starts from operands alone has no other tie to this place.
            tied += dict.fromkeys(
                v
                for step in group.equations
                if not program.reads[step]
                for i in fused_program.groups[step]
                for v in jaxpr.eqns[i].invars
                if isinstance(v, Var) and v in operands
            )
            place = jaxpr.eqns[fused_program.groups[group.equations[0]][-1]]
            emitter.barrier(tied, like=place)
            barriers += 1
        for step in group.equations:
            *inlined, root = fused_program.groups[step]
            for i in inlined:
                # After a barrier again, so that no barrier ties what takes no memory
                # within a kernel.
                if written_after.get(i) != barriers:
                    emitter.evaluate(i)
                    written_after[i] = barriers
            emitter.evaluate(root)
    return emitter.finish()


def _size(v: Var) -> int:
    return num_bytes(v.aval) if hasattr(v.aval, "dtype") else 0


def _once(eqn: JaxprEqn) -> bool:
    return side_effects(eqn) or eqn.primitive.name == "pure_callback"


def _inlined(eqns: Sequence[JaxprEqn], results: set[Var]) -> list[bool]:
    """For each equation, whether it is part of the kernels that read its result."""
    users: dict[Var, set[int]] = {}
    inlined = [False] * len(eqns)
    for i in range(len(eqns) - 1, -1, -1):
        eqn = eqns[i]
        name = eqn.primitive.name
        if len(eqn.outvars) == 1 and eqn.outvars[0] not in results and not eqn.effects:
            uses = users.get(eqn.outvars[0], set())
            fusing = all(eqns[k].primitive.name in _FUSING for k in uses)
            from_nothing = not any(isinstance(v, Var) for v in eqn.invars)
            inlined[i] = (
                name in _VIEWS
                or (fusing and (name in _EXPANDING or (from_nothing and name in CHEAP)))
                or (fusing and name in _FUSING - _REDUCTIONS and len(uses) == 1)
            )
        # The uses of what is part of its uses are those of its operands.
        here = users.get(eqn.outvars[0], set()) if inlined[i] and name in _VIEWS else ()
        for v in eqn.invars:
            if isinstance(v, Var):
                users.setdefault(v, set()).update(here or {i})
    return inlined


def _members(
    root: int, eqns: Sequence[JaxprEqn], maker: dict[Var, int], inlined: Sequence[bool]
) -> tuple[list[int], list[Var]]:
    """The equations of the kernel of `root`, in order, and what it reads."""
    members, external, stack = {root}, {}, [root]
    while stack:
        for v in eqns[stack.pop()].invars:
            if not isinstance(v, Var):
                continue
            k = maker.get(v)
            if k is None or not inlined[k]:
                external[v] = None
            elif k not in members:
                members.add(k)
                stack.append(k)
    return sorted(members), list(external)
