"""Programs as a planner sees them: equations that read and make values with sizes."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True, eq=False)
class Program:
    """A straight-line program, its equations in the order of execution.

    Values are numbers from 0. Operands and constants of the program are none of them:
    they are there throughout, whatever is planned.

    Attributes:
        reads: for each equation, the values it reads.
        makes: for each equation, the values it makes.
        value_bytes: for each value, its size. A value that stays in memory that isn't
            planned, as what a compiled function returns does, has 0.
        costs: for each equation, the time to evaluate it once, in any one unit.
        results: values that are needed at the end.
        workspace_bytes: for each equation, memory besides its operands and results
            while it is evaluated; empty for none.
        repeatable: for each equation, whether it may be evaluated again; empty if all
            may.
        names: what each equation is called in reports; empty for their numbers.

    Raises:
        ValueError: an equation reads what none before it made, two make the same value,
            a size or a cost is negative, or lengths differ.
    """

    reads: Sequence[Sequence[int]]
    makes: Sequence[Sequence[int]]
    value_bytes: Sequence[int]
    costs: Sequence[float]
    results: Sequence[int]
    workspace_bytes: Sequence[int] = ()
    repeatable: Sequence[bool] = ()
    names: Sequence[Hashable] = ()

    def __post_init__(self) -> None:
        n = len(self.reads)
        if not self.workspace_bytes:
            object.__setattr__(self, "workspace_bytes", (0,) * n)
        if not self.repeatable:
            object.__setattr__(self, "repeatable", (True,) * n)
        if not self.names:
            object.__setattr__(self, "names", range(n))
        for field in ("makes", "costs", "workspace_bytes", "repeatable", "names"):
            if len(getattr(self, field)) != n:
                raise ValueError(
                    f"The program has {n} equations, but `{field}` is for "
                    f"{len(getattr(self, field))}."
                )
        made: set[int] = set()
        for i, (reads, makes) in enumerate(zip(self.reads, self.makes, strict=True)):
            missing = [v for v in reads if v not in made]
            if missing:
                raise ValueError(
                    f"Equation {self.names[i]} reads value {missing[0]}, which none "
                    "before it makes. List equations in an order of execution."
                )
            for v in makes:
                if v in made or not 0 <= v < len(self.value_bytes):
                    raise ValueError(
                        f"Equation {self.names[i]} makes value {v}, which another one "
                        "makes or which has no size."
                    )
                made.add(v)
        lost = [v for v in self.results if v not in made]
        if lost:
            raise ValueError(f"No equation makes the result {lost[0]}.")
        for what, amounts in [
            ("size", self.value_bytes),
            ("workspace", self.workspace_bytes),
            ("cost", self.costs),
        ]:
            if any(not 0 <= amount < float("inf") for amount in amounts):
                raise ValueError(f"A {what} is negative or not finite.")

    def __len__(self) -> int:
        """How many equations there are."""
        return len(self.reads)

    @cached_property
    def total_cost(self) -> float:
        """The cost of evaluating every equation once."""
        return float(sum(self.costs))

    @staticmethod
    def from_graph(graph: Mapping[str, Any]) -> "Program":
        """The program of a graph whose nodes each make one value.

        Args:
            graph: `{"nodes": [{"id", "bytes", "cost", "inputs": [ids]}, ...],
                "outputs": [ids]}`, the nodes in an order of execution. A node may have
                "workspace" (bytes) and "repeatable" (true or false) too.

        Raises:
            ValueError: something is missing or of the wrong kind, with its place.
        """
        if not isinstance(graph, Mapping) or "nodes" not in graph:
            raise ValueError(
                'A graph is an object with "nodes" and "outputs"; there are no "nodes".'
            )
        number: dict[Hashable, int] = {}
        reads, sizes, costs, workspace, repeatable = [], [], [], [], []
        for i, node in enumerate(graph["nodes"]):
            try:
                sizes.append(int(node["bytes"]))
                costs.append(float(node["cost"]))
                inputs = list(node.get("inputs", ()))
                name = node["id"]
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"Node {i} of the graph is {node!r}. It needs an id, bytes and "
                    f"cost (numbers), and inputs (a list of ids); {error!r}."
                ) from error
            unknown = [x for x in inputs if x not in number]
            if unknown:
                raise ValueError(
                    f"Node {name!r} reads {unknown[0]!r}, which is no node before it. "
                    "List the nodes in an order of execution."
                )
            if name in number:
                raise ValueError(f"Two nodes have the id {name!r}.")
            number[name] = i
            reads.append(tuple(number[x] for x in inputs))
            workspace.append(int(node.get("workspace", 0)))
            repeatable.append(bool(node.get("repeatable", True)))
        lost = [x for x in graph.get("outputs", ()) if x not in number]
        if lost:
            raise ValueError(f"The output {lost[0]!r} is no node of the graph.")
        return Program(
            reads=tuple(reads),
            makes=tuple((i,) for i in range(len(reads))),
            value_bytes=tuple(sizes),
            costs=tuple(costs),
            results=tuple(number[x] for x in graph.get("outputs", ())),
            workspace_bytes=tuple(workspace),
            repeatable=tuple(repeatable),
            names=tuple(number),
        )
