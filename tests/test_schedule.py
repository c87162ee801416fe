"""Schedules of recomputation, replayed by an interpreter of their own."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat._schedule import Group, just_in_time


@dataclass(frozen=True)
class Program:
    """A program as `just_in_time` takes it; its operands are numbered from 0."""

    reads: tuple[tuple[int, ...], ...]
    makes: tuple[tuple[int, ...], ...]
    is_backward: tuple[bool, ...]
    is_cheap: tuple[bool, ...]
    cotangents: tuple[int, ...]
    results: tuple[int, ...]
    num_operands: int
    sizes: Mapping[int, int] = field(default_factory=lambda: defaultdict(lambda: 1))
    """Of each value; all of the same size if none is given."""

    def schedule(self) -> list[Group]:
        return just_in_time(
            self.reads,
            self.makes,
            self.is_backward,
            self.is_cheap,
            self.cotangents,
            self.results,
            self.sizes,
        )

    def waits(self, i: int) -> bool:
        """Whether equation i makes no less than it reads, and no result."""
        made, read = (
            sum(self.sizes[v] for v in values)
            for values in (self.makes[i], set(self.reads[i]))
        )
        return made >= read and not set(self.makes[i]).intersection(self.results)

    def recomputation_for(self, values: tuple[int, ...]) -> set[int]:
        """The recomputing equations that `values` are made by, directly or not."""
        found: set[int] = set()
        for i in reversed(range(len(self.reads))):
            wanted = {*values, *(v for e in found for v in self.reads[e])}
            if not self.is_backward[i] and wanted.intersection(self.makes[i]):
                found.add(i)
        return found


@st.composite
def programs(draw) -> Program:
    num_plain = draw(st.integers(0, 3))
    num_operands = num_plain + draw(st.integers(1, 2))
    cotangents = tuple(range(num_plain, num_operands))
    plain, every = list(range(num_plain)), list(range(num_operands))
    reads, makes, is_backward, is_cheap = [], [], [], []
    for _ in range(draw(st.integers(0, 12))):
        source = every if not plain or draw(st.booleans()) else plain
        read = tuple(draw(st.lists(st.sampled_from(source), max_size=3)))
        backward = any(v not in plain for v in read)
        made = tuple(
            range(len(every), len(every) + draw(st.sampled_from([1, 1, 1, 2])))
        )
        every.extend(made)
        if not backward:
            plain.extend(made)
        reads.append(read)
        makes.append(made)
        is_backward.append(backward)
        is_cheap.append(draw(st.booleans()))
    return Program(
        tuple(reads),
        tuple(makes),
        tuple(is_backward),
        tuple(is_cheap),
        cotangents,
        tuple(draw(st.lists(st.sampled_from(every), max_size=4))),
        num_operands,
        {v: draw(st.integers(0, 4)) for v in every},
    )


def equations(groups: list[Group]) -> list[int]:
    return [i for group in groups for i in group.equations]


@given(programs())
def test_everything_needed_is_evaluated_once_and_nothing_else(program: Program):
    backward = {i for i, back in enumerate(program.is_backward) if back}
    needed = backward | program.recomputation_for(program.results)
    for i in backward:
        needed |= program.recomputation_for(program.reads[i])
    assert sorted(equations(program.schedule())) == sorted(needed)


@given(programs())
def test_what_is_read_was_made_before(program: Program):
    made = set(range(program.num_operands))
    for i in equations(program.schedule()):
        assert made.issuperset(program.reads[i])
        made.update(program.makes[i])
    assert made.issuperset(program.results)


@given(programs())
def test_backward_equations_stand_alone(program: Program):
    for group in program.schedule():
        if any(program.is_backward[i] for i in group.equations):
            assert len(group.equations) == 1
            assert not group.has_barrier
        else:
            assert list(group.equations) == sorted(group.equations)


@given(programs())
def test_backward_equations_that_shrink_keep_their_order(program: Program):
    order = [i for i in equations(program.schedule()) if program.is_backward[i]]
    shrinking = [i for i in order if not program.waits(i)]
    assert shrinking == sorted(shrinking)


@given(programs())
def test_backward_equations_that_do_not_shrink_wait_for_their_use(program: Program):
    order = [i for i in equations(program.schedule()) if program.is_backward[i]]
    for position, i in enumerate(order):
        if not program.waits(i):
            continue
        # All between it and its first use is there for the same use.
        later = order[position + 1 :]
        for use in later:
            if set(program.makes[i]).intersection(program.reads[use]):
                break
            assert program.waits(use)


@given(programs())
def test_recomputation_comes_right_before_its_first_use(program: Program):
    groups = program.schedule()
    backward = [i for i in equations(groups) if program.is_backward[i]]
    for position, group in enumerate(groups):
        for i in group.equations:
            if program.is_backward[i]:
                continue
            first_use = next(
                (
                    b
                    for b in backward
                    if i in program.recomputation_for(program.reads[b])
                ),
                None,
            )
            if first_use is None:  # only a result needs it
                assert position == len(groups) - 1
            else:
                assert groups[position + 1].equations == (first_use,)


@given(programs())
def test_barriers_tie_what_was_made_since_the_last_and_is_still_needed(
    program: Program,
):
    groups = program.schedule()
    made_since = list(program.cotangents)
    for position, group in enumerate(groups):
        if group.has_barrier:
            to_come = equations(groups[position:])
            needed = {*program.results, *(v for i in to_come for v in program.reads[i])}
            assert group.settled == tuple(v for v in made_since if v in needed)
            made_since = []
        made_since += [v for i in group.equations for v in program.makes[i]]


@given(programs())
def test_barriers_tie_what_the_recomputation_starts_from(program: Program):
    for group in program.schedule():
        if not group.has_barrier:
            continue
        made = {v for i in group.equations for v in program.makes[i]}
        starts = {v for i in group.equations for v in program.reads[i]} - made
        assert starts == starts.intersection([*group.inputs, *group.settled])
        assert starts.issuperset(group.inputs)
        assert len({*group.inputs, *group.settled}) == len(group.inputs) + len(
            group.settled
        )


@given(programs())
def test_no_recomputation_starts_from_what_a_compiler_could_merge(program: Program):
    # What was made after a barrier, or went through one, can't be had any earlier.
    held_back = set(program.cotangents)
    for group in program.schedule():
        held_back.update(group.inputs, group.settled)
        for i in group.equations:
            if not program.is_backward[i]:
                assert held_back.issuperset(program.reads[i])
            held_back.update(program.makes[i])


@given(programs())
def test_only_cheap_equations_behind_a_barrier_do_without_one(program: Program):
    held_back = set(program.cotangents)
    for group in program.schedule():
        recomputes = not program.is_backward[group.equations[0]]
        made = {v for i in group.equations for v in program.makes[i]}
        starts = {v for i in group.equations for v in program.reads[i]} - made
        without = all(program.is_cheap[i] for i in group.equations) and (
            starts <= held_back
        )
        if recomputes and starts:
            assert group.has_barrier != without
        held_back |= {*group.inputs, *group.settled, *made}


@given(programs(), st.randoms(use_true_random=False))
def test_schedule_does_not_depend_on_the_numbers_of_values(program: Program, random):
    num_values = program.num_operands + sum(len(made) for made in program.makes)
    new = list(range(num_values))
    random.shuffle(new)

    def renumbered(values):
        return tuple(new[v] for v in values)

    other = replace(
        program,
        reads=tuple(renumbered(v) for v in program.reads),
        makes=tuple(renumbered(v) for v in program.makes),
        cotangents=renumbered(program.cotangents),
        results=renumbered(program.results),
        sizes={new[v]: size for v, size in program.sizes.items()},
    )
    assert other.schedule() == [
        Group(g.equations, renumbered(g.inputs), renumbered(g.settled))
        for g in program.schedule()
    ]


@settings(max_examples=20)
@given(programs())
def test_schedule_is_the_same_each_time(program: Program):
    assert program.schedule() == program.schedule()


# By hand. Operands x, w and the cotangent; y = f(x, w), z = f(y, w).
X, W, CT, Y, Z, DZ, DY, DX = range(8)
CHAIN = Program(
    reads=((X, W), (Y, W), (CT, Z), (DZ, Y), (DY, X)),
    makes=((Y,), (Z,), (DZ,), (DY,), (DX,)),
    is_backward=(False, False, True, True, True),
    is_cheap=(False,) * 5,
    cotangents=(CT,),
    results=(DX,),
    num_operands=3,
)


def test_chain():
    assert CHAIN.schedule() == [
        Group((0, 1), inputs=(X, W), settled=(CT,)),
        Group((2,)),
        Group((3,)),
        Group((4,)),
    ]


def test_two_chains_are_recomputed_in_turn():
    # u = f(x), v = f(w); the second isn't needed before the second backward equation.
    u, v, d, e = 3, 4, 5, 6
    program = Program(
        reads=((X,), (W,), (CT, u), (d, v)),
        makes=((u,), (v,), (d,), (e,)),
        is_backward=(False, False, True, True),
        is_cheap=(False,) * 4,
        cotangents=(CT,),
        results=(e,),
        num_operands=3,
    )
    assert program.schedule() == [
        Group((0,), inputs=(X,), settled=(CT,)),
        Group((2,)),
        # u is used up, and the cotangent too.
        Group((1,), inputs=(W,), settled=(d,)),
        Group((3,)),
    ]
    assert replace(program, results=(e, CT, u)).schedule()[2] == Group(
        (1,), inputs=(W,), settled=(u, d)
    )


@pytest.mark.parametrize("cheap", [False, True])
@pytest.mark.parametrize("held_back", [False, True])
def test_lone_cheap_equation(cheap, held_back):
    # u = f(x), v = g(x): x went through the barrier for u, or v starts from w instead.
    u, v, d, e = 3, 4, 5, 6
    start = X if held_back else W
    program = Program(
        reads=((X,), (start,), (CT, u), (d, v)),
        makes=((u,), (v,), (d,), (e,)),
        is_backward=(False, False, True, True),
        is_cheap=(False, cheap, False, False),
        cotangents=(CT,),
        results=(e,),
        num_operands=3,
    )
    assert program.schedule()[2].has_barrier == (not (cheap and held_back))


def test_recomputation_that_starts_from_nothing_has_no_barrier():
    u, d = 1, 2
    program = Program(
        reads=((), (0, u)),
        makes=((u,), (d,)),
        is_backward=(False, True),
        is_cheap=(False, False),
        cotangents=(0,),
        results=(d,),
        num_operands=1,
    )
    assert program.schedule() == [Group((0,)), Group((1,))]


def test_recomputation_for_a_result_alone_comes_last():
    program = replace(CHAIN, reads=(*CHAIN.reads[:2], (CT, Y), (DZ,), (DY,)))
    assert program.schedule()[0].equations == (0,)
    with_result = replace(program, results=(DX, Z))
    assert with_result.schedule()[-1] == Group((1,), inputs=(W,), settled=(Y, DX))


def test_expansion_waits_while_what_an_earlier_equation_needs_is_recomputed():
    # d expands the cotangent, for f; e needs u, recomputed from x.
    u, d, e, f = 3, 4, 5, 6
    program = Program(
        reads=((X,), (CT,), (CT, u), (d, e)),
        makes=((u,), (d,), (e,), (f,)),
        is_backward=(False, True, True, True),
        is_cheap=(False,) * 4,
        cotangents=(CT,),
        results=(f,),
        num_operands=3,
        sizes={X: 4, W: 4, CT: 4, u: 16, d: 16, e: 4, f: 4},
    )
    assert program.schedule() == [
        Group((0,), inputs=(X,), settled=(CT,)),
        Group((2,)),
        Group((1,)),
        Group((3,)),
    ]
    # A result is no temporary, and nothing is gained by waiting.
    with_result = replace(program, results=(f, d))
    assert equations(with_result.schedule()) == [1, 0, 2, 3]


def test_nothing_to_do():
    program = Program((), (), (), (), cotangents=(0,), results=(0,), num_operands=1)
    assert program.schedule() == []
