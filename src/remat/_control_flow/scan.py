"""Loops with a known number of iterations, opened for policies.

A loop stacks what is saved in its iterations. Each iteration is recomputed from what
was carried into it, so the stack of carries is wanted too. It is saved where the policy
saves what the carry is made of. Otherwise it is recomputed, by running the loop again
from its start, or from the saved stacks where these are enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend.core import DropVar, Var

from remat._control_flow.nested import named_operands
from remat._control_flow.parts import (
    Atom,
    Parts,
    Results,
    Save,
    Saved,
    partition,
    variables,
)
from remat._jax import (
    ClosedJaxpr,
    JaxprEqn,
    build_jaxpr,
    num_bytes,
    scan_counts,
    scan_equation,
    stacked_type,
)
from remat._policies import Policy


@dataclass(frozen=True, eq=False)
class _Loop:
    """A scan equation with its parts by name; `ys` are the results of an iteration."""

    eqn: JaxprEqn
    body: ClosedJaxpr
    consts: Sequence[Var]
    carry_in: Sequence[Var]
    carry_out: Sequence[Atom]
    ys: Sequence[Atom]

    @property
    def length(self) -> int:
        return self.eqn.params["length"]

    def stack_bytes(self, values: Sequence[Var]) -> int:
        return sum(self.length * num_bytes(v.aval) for v in values)


@dataclass(frozen=True, eq=False)
class _Again:
    """How to run a loop again.

    Attributes:
        part: the slice of its body.
        carries: the carries that it runs on, by position.
        extra: values whose stacks it reads and the loop does not return so far.
    """

    part: Saved
    carries: list[int]
    extra: list[Var]


def _loop(eqn: JaxprEqn) -> _Loop:
    body: ClosedJaxpr = eqn.params["jaxpr"]
    invars, outvars = body.jaxpr.invars, body.jaxpr.outvars
    num_consts, num_carry = scan_counts(eqn)
    return _Loop(
        eqn,
        body,
        invars[:num_consts],
        invars[num_consts : num_consts + num_carry],
        outvars[:num_carry],
        outvars[num_carry:],
    )


def scan_split(
    eqn: JaxprEqn, wanted: Sequence[Var], save: Save, policy: Policy
) -> Parts:
    """Stack what is saved in each iteration.

    Where recomputing a result would need further stacks of no fewer bytes than it has,
    it is saved in place of those, which the policy allows. So are the carries, which
    may be the very values that the policy names, one iteration later.
    """
    loop = _loop(eqn)
    jaxpr, num_carry = loop.body.jaxpr, len(loop.carry_in)
    position = {v: i for i, v in enumerate(eqn.outvars)}
    inner = dict(zip(eqn.outvars, jaxpr.outvars, strict=True))
    # For results that are the stack of a carry, which carry it is.
    carry_of = {v: i for i, v in enumerate(loop.carry_in)}
    stack_of = {
        v: carry_of[u]
        for v in wanted
        if isinstance(u := inner[v], Var) and u in carry_of
        if position[v] >= num_carry
    }
    made_of = {
        v: loop.carry_out[stack_of[v]] if v in stack_of else inner[v] for v in wanted
    }
    part = save(loop.body, variables(made_of.values()))
    named = named_operands(loop.body, policy)
    direct, rest = partition(
        wanted,
        lambda v: (
            part.keeps(made_of[v])
            # A carry may have its name at the start of the next iteration.
            or (v in stack_of and loop.carry_in[stack_of[v]] in named)
        ),
    )

    # What the last iteration hands on is one more of what is stacked.
    stacked_carries = {stack_of[v] for v in direct if v in stack_of}
    more, rest = partition(rest, lambda v: position[v] in stacked_carries)
    direct += more

    def run_again(results: list[Var]) -> _Again:
        """What makes `results`, from the start of the loop and from saved stacks."""
        at_hand = {stack_of[v] for v in direct if v in stack_of}
        carries = {position[v] for v in results if position[v] < num_carry}
        ys = [inner[v] for v in results if position[v] >= num_carry]
        while True:
            outs = [*(loop.carry_out[i] for i in sorted(carries)), *ys]
            part = save(loop.body, variables(outs))
            reads = part.reads(outs)
            more = {i for v, i in carry_of.items() if v in reads} - carries - at_hand
            if not more:
                stacked = part.positions(loop.ys)
                extra = [u for u in part.values if u not in stacked]
                return _Again(part, sorted(carries), extra)
            carries |= more

    again = run_again(rest)
    if again.extra:
        finals, stacks = partition(rest, lambda v: position[v] < num_carry)
        carried, ys = partition(stacks, lambda v: v in stack_of)
        for results, counted in [
            ([*carried, *finals], carried or finals),
            *(([v], [v]) for v in ys),
        ]:
            extra_bytes = loop.stack_bytes(run_again(results).extra)
            if extra_bytes >= sum(num_bytes(v.aval) for v in counted) > 0:
                direct += results
        rest = [v for v in rest if v not in direct]
        again = run_again(rest)
    if not rest:
        return Parts(eqn, tuple(direct), None)

    part, carries, extra = again.part, again.carries, again.extra
    results = Results(eqn)
    outer: dict[Var, Atom] = {
        loop.carry_in[stack_of[v]]: v for v in direct if v in stack_of
    }
    stack_position = part.positions(loop.ys)
    saved = list(direct)
    for u in part.values:
        if u in stack_position:
            outer[u] = results.at(num_carry + stack_position[u])
        else:
            outer[u] = results.add(stacked_type(u.aval, loop.length))
        saved.append(outer[u])
    body = part.extended(loop.body, extra)
    known = scan_equation(
        eqn, body, eqn.invars, results.outvars, len(loop.consts), num_carry
    )

    ys = [v for v in rest if position[v] >= num_carry]
    carry_in = [loop.carry_in[i] for i in carries]
    outs = [*(loop.carry_out[i] for i in carries), *(inner[v] for v in ys)]
    reads = part.reads(outs) - set(carry_in)
    consts = [v for v in loop.consts if v in reads]
    xs = [
        v
        for v in dict.fromkeys([*outer, *jaxpr.invars])
        if v in reads and v not in consts
    ]
    slice_ = build_jaxpr(
        [*consts, *carry_in, *xs],
        [part.copy(v) for v in outs],
        part.recomputed,
        like=jaxpr,
    )
    operand: dict[Var, Atom] = dict(zip(jaxpr.invars, eqn.invars, strict=True))
    finals = [eqn.outvars[i] for i in carries]
    recomputed = scan_equation(
        eqn,
        slice_,
        [
            *(operand[v] for v in (*consts, *carry_in)),
            *((operand | outer)[v] for v in xs),
        ],
        [*(v if v in rest else DropVar(v.aval) for v in finals), *ys],
        len(consts),
        len(carry_in),
    )
    return Parts(known, tuple(dict.fromkeys(saved)), recomputed)
