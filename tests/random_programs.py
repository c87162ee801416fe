"""Random programs as Python source.

A program is a function `f(s, v, m, i, p)` of a scalar, a vector and a matrix of floats,
an integer and a bool. It is drawn as source, so that a failure prints what can be run;
in it `checkpoint` is `remat.checkpoint` and `jax_checkpoint` is `jax.checkpoint`. The
undecorated program is the same source, with both of them doing nothing.

A variable is called after its type and a number: `v12` is a vector, `p3` is a bool.
Values stay near one, so that the results of loops and derivatives can be compared.
"""

import string
import zlib
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from problems import doubled_sine

import remat

FLOATS, TYPES = "svm", "svmip"


def cheap(prim: Any, *avals: Any, **params: Any) -> bool:
    del avals, params
    return prim.name not in ("sin", "tanh", "dot_general")


def erratic(prim: Any, *avals: Any, **params: Any) -> bool:
    del params
    return (zlib.crc32(prim.name.encode()) + len(avals)) % 2 == 0


@jax.custom_vjp
def tripled(x):
    return jnp.sin(x)


def tripled_fwd(x):
    return remat.checkpoint_name(jnp.sin(x), "a"), (jnp.cos(x), x)


def tripled_bwd(residuals, ct):
    # Not the derivative, so that a rule that is passed over shows.
    cos, x = residuals
    return (3.0 * ct * cos + 0.1 * jnp.sin(x) * ct,)


tripled.defvjp(tripled_fwd, tripled_bwd)


# What the source of a program may use, less the two checkpoints.
NAMESPACE = {
    "jax": jax,
    "jnp": jnp,
    "checkpoint_name": remat.checkpoint_name,
    "policies": remat.policies,
    "cheap": cheap,
    "erratic": erratic,
    "doubled_sine": doubled_sine,
    "tripled": tripled,
    # Added before a maximum is taken, so that there is a single one.
    "steps": jnp.array([0.0, 0.31, 0.17]),
}

# Expressions by type. A placeholder stands for a variable of its type, `x` for one of
# the type of the result, `name` for a name that policies may know.
ELEMENTWISE = (
    "jnp.sin({x})",
    "jnp.tanh({x} * {x})",
    'checkpoint_name({x}, "{name}")',
    "jnp.tanh({x})",
    "{x} * jnp.cos({x})",
    "0.5 * ({x} - {x})",
    "jnp.exp(-jnp.square({x}))",
    "{x} / (1.5 + jnp.square({x}))",
    "{x} * jnp.sin({s})",
    "jnp.where({p}, {x}, {x})",
    "jnp.sin({x} * {i}.astype(jnp.float32))",
    "jax.nn.softplus({x}) - 1.0",
    "jax.lax.stop_gradient({x})",
    "doubled_sine({x}, {x})",
)
EXPRESSIONS: dict[str, tuple[str, ...]] = {
    "s": (
        *ELEMENTWISE,
        "{v} @ {v} / 3.0",
        "jnp.tanh({v} @ {m} @ {v})",
        "{v}[{i}]",
        "{m}[{i}, 1]",
        "jnp.sum({v}) / 3.0",
        "jnp.mean({m})",
        "jnp.max({v} + steps)",
        "jax.nn.logsumexp({v})",
    ),
    "v": (
        *ELEMENTWISE,
        "{m} @ {v} / 3.0",
        "jnp.tanh({v} @ {m})",
        "jax.vmap(jnp.dot)({m}, {m}) / 3.0",
        "jnp.broadcast_to({s}, (3,))",
        "jnp.stack([{s}, {s}, {s}])",
        "{v}[::-1]",
        "jnp.concatenate([{v}[:1], {v}[1:]])",
        "{m}[{i}]",
        "{m}[1]",
        "{v}[jnp.stack([{i}, {i}, {i}])]",
        "{v}.at[{i}].set({s})",
        "0.5 * {v}.at[{i}].add({s})",
        "jax.lax.dynamic_slice({m}, ({i}, {i}), (1, 3))[0]",
        "jax.lax.dynamic_update_slice({v}, {s}[None], ({i},))",
        "jnp.cumsum({v}) / 3.0",
        "jnp.sort({v} + steps)",
        "jax.nn.softmax({v})",
        "jnp.max({m} + steps, axis=1)",
        "jnp.mean({m}, axis=0)",
        "steps",
    ),
    "m": (
        *ELEMENTWISE,
        "{m} @ {m} / 3.0",
        "jnp.tanh({m} @ {m}.T)",
        "jnp.outer({v}, {v})",
        "jnp.broadcast_to({v}[:, None], (3, 3))",
        "jnp.stack([{v}, {v}, {v}])",
        "{m}.T",
        "{m}.at[{i}].set({v})",
        "{m}[jnp.stack([{i}, {i}, {i}])]",
        "jnp.cumsum({m}, axis=1) / 3.0",
        "jax.nn.softmax({m}, axis=0)",
        "jnp.eye(3)",
    ),
    "i": (
        "({i} + 1) % 3",
        "jnp.where({p}, {i}, {i})",
        "{p}.astype(jnp.int32)",
        "jnp.argmax({v} + steps)",
    ),
    "p": (
        "~{p}",
        "{i} > 1",
        "{s} > 0.123",
        "jnp.any({v} > 0.321)",
    ),
}
# The derivative of its rule for reverse mode is all that this one has.
REVERSE_ONLY = "tripled({x})"

NAMES = st.sampled_from("abc")
JAX_POLICIES = st.sampled_from(
    [
        "None",
        "jax.checkpoint_policies.everything_saveable",
        "jax.checkpoint_policies.dots_with_no_batch_dims_saveable",
        'jax.checkpoint_policies.save_only_these_names("a")',
        'jax.checkpoint_policies.save_any_names_but_these("a")',
    ]
)
SINGLE_POLICIES = st.one_of(
    st.sampled_from(
        [
            "None",
            "policies.nothing_saveable",
            "policies.everything_saveable",
            "policies.dots_saveable",
            "policies.dots_with_no_batch_dims_saveable",
            "cheap",
            "erratic",
        ]
    ),
    NAMES.map('policies.save_only_these_names("{}")'.format),
    NAMES.map('policies.save_any_names_but_these("{}")'.format),
    JAX_POLICIES,
)
BOTH = st.tuples(SINGLE_POLICIES, SINGLE_POLICIES).filter(lambda p: "None" not in p)
POLICIES = st.one_of(
    SINGLE_POLICIES,
    BOTH.map(lambda p: f"policies.save_from_both_policies({', '.join(p)})"),
)
CHECKPOINTS = st.builds(
    "checkpoint(policy={}, prevent_cse={})".format,
    POLICIES,
    st.sampled_from([True, True, False]),
)


@dataclass
class Writer:
    """Draws a program and writes its source.

    Attributes:
        draw: the function that hypothesis gives to composite strategies.
        derivatives: which derivatives the program has to have, "all", "forward" or
            "reverse".
        lines: the source up to now.
        unused: variables that no line reads yet.
    """

    draw: Callable[[Any], Any]
    derivatives: str
    lines: list[str] = field(default_factory=list)
    indent: int = 0
    number: int = 0
    unused: set[str] = field(default_factory=set)

    def write(self, line: str) -> None:
        self.lines.append("    " * self.indent + line)

    def pick(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def new(self, types: Sequence[str]) -> list[str]:
        self.number += len(types)
        first = self.number - len(types)
        names = [f"{t}{first + i}" for i, t in enumerate(types)]
        self.unused.update(names)
        return names

    def one_of(self, scope: list[str], kind: str) -> str:
        """A variable of that type, likelier one that is unused, or late."""
        known = [name for name in reversed(scope) if name[0] == kind]
        known.sort(key=lambda name: name not in self.unused)
        name = self.pick(*known[:4])
        self.unused.discard(name)
        return name

    def several(self, scope: list[str], types: Sequence[str]) -> list[str]:
        return [self.one_of(scope, t) for t in types]

    def results(self, outer: list[str], scope: list[str]) -> list[str]:
        """The variables that `scope` has beyond `outer` and that nothing reads."""
        found = [v for v in scope if v not in outer and v in self.unused]
        self.unused.difference_update(found)
        return found or [scope[-1]]

    def types(self, most: int, of: str = TYPES) -> list[str]:
        return self.draw(st.lists(st.sampled_from(of), min_size=1, max_size=most))

    @contextmanager
    def function(self, header: str, *decorators: str):
        for decorator in decorators:
            self.write(f"@{decorator}")
        self.write(f"def {header}:")
        self.indent += 1
        yield
        self.indent -= 1

    def body(
        self, scope: list[str], depth: int, most: int, least: int = 1
    ) -> list[str]:
        """The scope after some statements."""
        scope = list(scope)
        for _ in self.draw(st.lists(st.none(), min_size=least, max_size=most)):
            nested = depth < 3 and self.draw(st.integers(0, 9)) >= 4 + depth
            write = self.pick(*self.constructs(depth)) if nested else self.expression
            scope += write(scope, depth)
        return scope

    def constructs(self, depth: int) -> list[Callable[[list[str], int], list[str]]]:
        found = [
            self.checkpointed,
            self.checkpointed,
            self.checkpointed,
            self.scan,
            self.cond,
            self.jitted,
            self.fori_loop,
            self.switch,
            self.jax_checkpointed,
            self.vmapped,
        ]
        if self.derivatives == "forward":
            found.append(self.while_loop)
        elif depth < 2:
            found.append(self.gradient)
        return found

    def expression(self, scope: list[str], depth: int) -> list[str]:
        del depth
        return [self.expression_of(scope, self.pick(*"vsmvsmvsmip"))]

    def expression_of(self, scope: list[str], kind: str) -> str:
        templates = list(EXPRESSIONS[kind])
        if kind in FLOATS and self.derivatives == "reverse":
            templates += [REVERSE_ONLY] * 4
        template = self.pick(*templates)
        (name,) = self.new(kind)
        pieces = []
        for text, placeholder, _, _ in string.Formatter().parse(template):
            pieces.append(text)
            if placeholder == "name":
                pieces.append(self.draw(NAMES))
            elif placeholder is not None:
                wanted = kind if placeholder == "x" else placeholder
                pieces.append(self.one_of(scope, wanted))
        code = "".join(pieces)
        if kind in FLOATS and self.draw(st.integers(0, 2)) == 2:
            code = f'checkpoint_name({code}, "{self.draw(NAMES)}")'
        self.write(f"{name} = {code}")
        return name

    def called(self, scope: list[str], depth: int, decorator: str) -> list[str]:
        """A decorated function, which closes over `scope`, and one or two calls."""
        params = self.types(3)
        (name,) = self.new("f")
        names = self.new(params)
        with self.function(f"{name}({', '.join(names)})", decorator):
            results = self.results(scope, self.body([*scope, *names], depth + 1, 3))
            self.write(f"return {listed(results)}")
        out_types = [v[0] for v in results]
        outs = []
        for _ in range(self.pick(1, 1, 2)):
            args = self.several([*scope, *outs], params)
            if self.draw(st.integers(0, 9)) == 9:  # a weak type
                args = [
                    "0.6" if t == "s" else v for v, t in zip(args, params, strict=True)
                ]
            new = self.new(out_types)
            self.write(f"{listed(new)} = {name}({', '.join(args)})")
            outs += new
        return outs

    def checkpointed(self, scope: list[str], depth: int) -> list[str]:
        return self.called(scope, depth, self.draw(CHECKPOINTS))

    def jax_checkpointed(self, scope: list[str], depth: int) -> list[str]:
        decorator = f"jax_checkpoint(policy={self.draw(JAX_POLICIES)})"
        return self.called(scope, depth, decorator)

    def jitted(self, scope: list[str], depth: int) -> list[str]:
        return self.called(scope, depth, "jax.jit")

    def vmapped(self, scope: list[str], depth: int) -> list[str]:
        """Over the elements of a vector or the rows of a matrix."""
        mapped, out = self.pick("vs", "mv"), self.pick("sv", "vm")
        name, source = self.new("f")[0], self.one_of(scope, mapped[0])
        row = self.new(mapped[1])
        with self.function(f"{name}({row[0]})", "jax.vmap"):
            inner = self.body([*scope, *row], depth + 1, 2)
            self.write(f"return {self.expression_of(inner, out[0])}")
        (new,) = self.new(out[1])
        self.write(f"{new} = {name}({source})")
        return [new]

    def gradient(self, scope: list[str], depth: int) -> list[str]:
        (kind,) = self.types(1, FLOATS)
        name, source = self.new("f")[0], self.one_of(scope, kind)
        param = self.new(kind)
        with self.function(f"{name}({param[0]})", "jax.grad"):
            inner = self.body([*scope, *param], depth + 1, 2)
            self.write(f"return {self.expression_of(inner, 's')}")
        (new,) = self.new(kind)
        self.write(f"{new} = {name}({source})")
        return [new]

    def scan(self, scope: list[str], depth: int) -> list[str]:
        """A scan over the elements of a vector and the rows of a matrix."""
        carry = self.types(2)
        length = self.pick(2, 3, 1, 0)
        options = f"reverse={self.pick(False, True)}, unroll={self.pick(1, 2)}"
        xs = self.several(scope, "vm")
        start = self.several(scope, carry)
        (name,) = self.new("f")
        c, x = self.new(carry), self.new("sv")
        with self.function(f"{name}(carry, xs)"):
            self.write(f"{listed(c)}, {listed(x)} = carry, xs")
            inner = self.body([*scope, *c, *x], depth + 1, 3)
            last = listed(self.several(inner, carry))
            floats = [v for v in inner if v[0] in FLOATS]
            results = self.results(scope, floats)
            self.write(f"return {last}, {listed(results)}")
        ys = [v[0] for v in results]
        new, stacked, sums = self.new(carry), self.new("y" * len(ys)), self.new(ys)
        pieces = listed([f"{v}[:{length}]" for v in xs])
        self.write(
            f"{listed(new)}, {listed(stacked)} = "
            f"jax.lax.scan({name}, {listed(start)}, {pieces}, {options})"
        )
        summed = [f"jnp.sum({v}, axis=0) / 3.0" for v in stacked]
        self.write(f"{listed(sums)} = {listed(summed)}")
        return [*new, *sums]

    def loop(self, scope: list[str], depth: int, dynamic: bool) -> list[str]:
        carry = self.types(2)
        start = self.several(scope, carry)
        stop = self.one_of(scope, "i") if dynamic else self.pick(2, 1, 3, 0)
        (name,) = self.new("f")
        counter, c = self.new("i"), self.new(carry)
        with self.function(f"{name}(index, carry)"):
            self.write(f"{counter[0]} = jnp.int32(index)  # of no weak type")
            self.write(f"{listed(c)} = carry")
            inner = self.body([*scope, *counter, *c], depth + 1, 3)
            self.write(f"return {listed(self.several(inner, carry))}")
        new = self.new(carry)
        self.write(
            f"{listed(new)} = jax.lax.fori_loop(0, {stop}, {name}, {listed(start)})"
        )
        return new

    def fori_loop(self, scope: list[str], depth: int) -> list[str]:
        return self.loop(scope, depth, dynamic=False)

    def while_loop(self, scope: list[str], depth: int) -> list[str]:
        return self.loop(scope, depth, dynamic=True)

    def branches(self, scope: list[str], depth: int, number: int, which: str):
        params, out_types = self.types(2), []
        names = self.new("f" * number)
        for name in names:
            args = self.new(params)
            decorators = [self.draw(CHECKPOINTS)] if self.pick(False, True) else []
            with self.function(f"{name}({', '.join(args)})", *decorators):
                inner = self.body([*scope, *args], depth + 1, 2)
                if not out_types:
                    results = self.results(scope, inner)
                    out_types = [v[0] for v in results]
                else:
                    results = self.several(inner, out_types)
                self.write(f"return {listed(results)}")
        new, args = self.new(out_types), ", ".join(self.several(scope, params))
        self.write(f"{listed(new)} = {which.format(', '.join(names))}, {args})")
        return new

    def cond(self, scope: list[str], depth: int) -> list[str]:
        which = f"jax.lax.cond({self.one_of(scope, 'p')}, {{}}"
        return self.branches(scope, depth, 2, which)

    def switch(self, scope: list[str], depth: int) -> list[str]:
        which = f"jax.lax.switch({self.one_of(scope, 'i')}, [{{}}]"
        return self.branches(scope, depth, self.pick(2, 3), which)

    def program(self) -> str:
        decorators = [self.draw(CHECKPOINTS)] if self.pick(True, False) else []
        arguments = [f"{t}" for t in TYPES]
        with self.function(f"f({', '.join(arguments)})", *decorators):
            scope = self.body(arguments, 0, 5, least=2)
            outs = self.results(arguments, scope)
            if not any(v[0] in FLOATS for v in outs):
                outs.append(self.one_of(scope, self.pick(*FLOATS)))
            self.write(f"return {listed(outs)}")
        if not any(line.strip().startswith("@checkpoint") for line in self.lines):
            self.lines.insert(0, f"@{self.draw(CHECKPOINTS)}")
        return "\n".join(self.lines)


def listed(names: Sequence[str]) -> str:
    return f"({', '.join(names)},)"
