"""The examples of the documentation run."""

import doctest
import importlib
import pathlib
import pkgutil
import re

import pytest

import remat

README = pathlib.Path(__file__).parents[1] / "README.md"
MODULES = [module.name for module in pkgutil.iter_modules(remat.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings(name):
    module = importlib.import_module(f"remat.{name}")
    assert doctest.testmod(module).failed == 0


def test_public_functions_have_an_example():
    for function in (remat.checkpoint, remat.saved_residuals):
        assert ">>>" in (function.__doc__ or "")


def test_example_of_the_readme(tmp_path, capsys):
    text = README.read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (table,) = re.findall(r"```pycon\n(.*?)```", text, re.DOTALL)
    call, *shown = table.splitlines()
    source = tmp_path / "model.py"
    source.write_text(code)
    namespace: dict[str, object] = {}
    exec(compile(code, source, "exec"), namespace)
    exec(call.removeprefix(">>> "), namespace)
    printed = capsys.readouterr().out.replace(f"{source}", "model.py").splitlines()
    assert shown == printed
