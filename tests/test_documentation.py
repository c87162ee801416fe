"""The examples of the documentation run."""

import doctest
import importlib
import json
import pathlib
import pkgutil
import re
import statistics

import pytest

import remat

ROOT = pathlib.Path(__file__).parents[1]
MODULES = [module.name for module in pkgutil.iter_modules(remat.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings(name):
    module = importlib.import_module(f"remat.{name}")
    assert doctest.testmod(module).failed == 0


def test_public_functions_have_an_example():
    for function in (remat.checkpoint, remat.saved_residuals):
        assert ">>>" in (function.__doc__ or "")


@pytest.mark.parametrize(
    ("page", "source"), [("README.md", "model.py"), ("docs/inside.md", "layers.py")]
)
def test_examples_of_a_page(page, source, tmp_path, capsys):
    """Blocks of Python are one program; what is shown of a session is printed."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```(python|pycon)\n(.*?)```", text, re.DOTALL)
    assert {kind for kind, _ in blocks} == {"python", "pycon"}
    path = tmp_path / source
    namespace: dict[str, object] = {}
    for kind, block in blocks:
        if kind == "python":
            path.write_text(block)
            exec(compile(block, path, "exec"), namespace)
            continue
        call, *shown = block.splitlines()
        exec(call.removeprefix(">>> "), namespace)
        printed = capsys.readouterr().out.replace(f"{path}", source).splitlines()
        assert shown == printed


def test_table_of_the_readme_is_what_was_measured():
    def version(path):
        return [int(part) for part in re.findall(r"\d+", path.stem)]

    results = (ROOT / "benchmarks/results").glob("checkpoint_memory-jax-*.json")
    newest = json.loads(max(results, key=version).read_text(encoding="utf-8"))
    figures = {(row["way"], row["of"]): row for row in newest["figures"]["GPT"]}
    plain = statistics.median(figures["no remat", ""]["step_seconds"])

    def cells(way, of):
        row = figures[way, of]
        seconds = statistics.median(row["step_seconds"])
        step = "1" if of == "" else f"{seconds / plain:.2f}"
        return [
            f"{row['temp_bytes'] / 2**20:.1f}",
            f"{row['flops'] / 1e9:.1f}",
            step,
        ]

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    _, _, body = text.partition(
        "| | temp MiB | GFLOP | step time |\n|---|---|---|---|\n"
    )
    shown = [line.replace("*", "").split("|")[2:5] for line in body.splitlines()[:5]]
    assert [[cell.strip() for cell in row] for row in shown] == [
        cells("no remat", ""),
        cells("a", "jax"),
        cells("a", "remat"),
        cells("b", "jax"),
        cells("b", "remat"),
    ]
