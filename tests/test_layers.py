"""The layer table: which module may import which, and who may import JAX."""

import ast
import inspect
import pathlib
from collections.abc import Iterator

import pytest

import remat

PACKAGE = pathlib.Path(remat.__file__).parent

# A module imports only from the layers below its own, and within its layer only from
# the modules listed before it. A module of a subpackage has a dotted name here.
LAYERS: dict[int, tuple[str, ...]] = {
    0: ("_errors", "_jax", "_barriers"),
    1: ("_units", "_program", "_simulate", "_schedule"),
    2: (
        "_solver",
        "_solver.min_cut",
        "_solver.shaving",
        "_solver.retention",
    ),
    3: (
        "_primitive",
        "_policies",
        "_constants",
        "_flatten",
        "_arguments",
        "_trace",
        "_emit",
        "_stage",
        "_control_flow",
        "_control_flow.parts",
        "_control_flow.nested",
        "_control_flow.scan",
        "_control_flow.cond",
        "_control_flow.shard_map",
        "_control_flow.bodies",
        "_saving",
        "_linearize",
        "_invalid",
        "_checkpoint",
        "_unplanned",
        "_cost",
        "_fusion",
    ),
    5: ("_residuals",),
    7: ("__init__",),
}
WITHOUT_JAX = (1, 2)
# The heavy packages that a function may import when it runs, so that `import remat`
# stays light.
IMPORTED_LATE = {"matplotlib", "ortools", "scipy"}

ORDER = [module for _, modules in sorted(LAYERS.items()) for module in modules]


def module_name(path: pathlib.Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if len(parts) > 1 and parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


SOURCES = {module_name(path): path for path in PACKAGE.rglob("*.py")}


def parse(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text(encoding="utf-8"))


def imports(tree: ast.AST, module: str) -> Iterator[tuple[int, str]]:
    """Yields (line, absolute dotted name) of everything that `tree` imports."""
    # The package that a relative import of this module starts from.
    package = ["remat", *module.split(".")]
    if SOURCES[module].name != "__init__.py":
        package.pop()
    elif module == "__init__":
        package = ["remat"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            yield from ((node.lineno, f"{source}.{a.name}") for a in node.names)


def own_module(name: str) -> str | None:
    """Returns the module of this package that a dotted name is in, if it is in one."""
    if name.split(".")[0] != "remat":
        return None
    parts = name.split(".")[1:]
    while parts and ".".join(parts) not in SOURCES:
        parts.pop()
    return ".".join(parts) or "__init__"


def test_table_lists_every_module_once():
    assert sorted(ORDER) == sorted(SOURCES)


@pytest.mark.parametrize("module", ORDER)
def test_module_imports_only_from_below(module: str):
    below = ORDER[: ORDER.index(module)]
    wrong = [
        f"line {line}: {imported}"
        for line, name in imports(parse(module), module)
        if (imported := own_module(name)) is not None and imported not in below
    ]
    assert not wrong


@pytest.mark.parametrize(
    "module", [m for layer in WITHOUT_JAX for m in LAYERS.get(layer, ())]
)
def test_module_does_not_import_jax(module: str):
    assert not [
        f"line {line}: {name}"
        for line, name in imports(parse(module), module)
        if name.split(".")[0] in ("jax", "jaxlib")
    ]


def test_only_one_module_reaches_into_jax():
    users = [
        module
        for module in SOURCES
        if "jax._src" in SOURCES[module].read_text(encoding="utf-8")
        or any(n.startswith("jax._src") for _, n in imports(parse(module), module))
    ]
    assert set(users) <= {"_jax"}


@pytest.mark.parametrize("module", ORDER)
def test_functions_import_only_heavy_packages(module: str):
    functions = [
        node
        for node in ast.walk(parse(module))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert not [
        f"line {line}: {name}"
        for function in functions
        for line, name in imports(function, module)
        if name.split(".")[0] not in IMPORTED_LATE
    ]


@pytest.mark.parametrize("name", remat.__all__)
def test_public_name_has_a_docstring(name: str):
    public = getattr(remat, name)
    doc = inspect.getdoc(public)
    assert doc
    # A dataclass without a docstring is given its signature for one.
    assert not doc.startswith(f"{name}(")
