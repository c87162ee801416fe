"""Runs the tests on every supported JAX, each in an environment of its own.

JAX needs a newer Python from release to release, so a JAX release is tested on the
Python that uv.lock pins it to. A version whose interpreter is not on this machine is
reported as such; `--require` makes that a failure. Arguments after `--` go to pytest.

The last line of the output is the total, `N passed, N failed, N skipped`.
"""

import argparse
import collections
import dataclasses
import os
import pathlib
import pwd
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
ENV_TOOL = str(ROOT / "tools" / "env")

# JAX release -> Python version, oldest first, as the group "jax" of pyproject.toml
# pins them.
SUPPORTED = {"0.10": "3.11", "0.11": "3.12", "0.12": "3.13"}


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of the tests on one JAX."""

    jax: str
    python: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    # Why the tests could not run, or why their run does not count.
    problem: str = ""
    interpreter_missing: bool = False

    @property
    def ok(self) -> bool:
        """Whether tests ran and all of them passed."""
        return self.passed > 0 and self.failed == 0 and not self.problem

    @property
    def outcome(self) -> str:
        """One cell of the table."""
        if self.interpreter_missing:
            return f"could not run: {self.problem}"
        counts = f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"
        return f"{counts}; {self.problem}" if self.problem else counts


def interpreter_candidates(version: str) -> Iterator[str]:
    """Yields paths where an interpreter of this version may be, the likeliest first."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    for folder in folders:
        if found := shutil.which(f"python{version}", path=folder):
            yield found
    # HOME may be unset or replaced, so the user's own home folder is searched too,
    # and so is the pyenv whose shims are on PATH.
    pyenvs = [pathlib.Path(folder).parent for folder in folders if "shims" in folder]
    if "PYENV_ROOT" in os.environ:
        pyenvs.append(pathlib.Path(os.environ["PYENV_ROOT"]))
    pyenvs.append(pathlib.Path.home() / ".pyenv")
    pyenvs.append(pathlib.Path(pwd.getpwuid(os.getuid()).pw_dir) / ".pyenv")
    for pyenv in dict.fromkeys(pyenvs):
        for path in sorted(pyenv.glob(f"versions/{version}*/bin/python"), reverse=True):
            yield str(path)
    found = subprocess.run(
        [ENV_TOOL, "uv", "python", "find", version], capture_output=True, text=True
    )
    if found.returncode == 0:
        yield found.stdout.strip()


def is_usable(interpreter: str, version: str) -> bool:
    """Whether this runs, is CPython of that version, and can make environments."""
    code = (
        "import sys, venv, ssl; print(*sys.version_info[:2], sep='.');"
        "print(sys.implementation.name, getattr(sys, 'abiflags', ''))"
    )
    try:
        answer = subprocess.run(
            [interpreter, "-I", "-c", code], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    # The abiflags exclude free-threaded and debug builds, which JAX has no wheels for.
    return answer.returncode == 0 and answer.stdout.split() == [version, "cpython"]


def find_interpreter(version: str) -> str | None:
    """Returns the first usable interpreter of this version, or None."""
    for candidate in dict.fromkeys(interpreter_candidates(version)):
        if is_usable(candidate, version):
            return candidate
    return None


def count_outcomes(report: pathlib.Path) -> collections.Counter[str]:
    """Counts the outcomes in a JUnit report; expected failures count as skipped."""
    counts: collections.Counter[str] = collections.Counter()
    for case in ET.parse(report).iter("testcase"):
        tags = {child.tag for child in case}
        if tags & {"failure", "error"}:
            counts["failed"] += 1
        else:
            counts["skipped" if "skipped" in tags else "passed"] += 1
    return counts


def run_tests(jax: str, python: str, pytest_args: list[str]) -> Result:
    """Runs the tests on one JAX and returns what became of them."""
    interpreter = find_interpreter(python)
    if interpreter is None:
        return Result(
            jax, python, problem="no interpreter found", interpreter_missing=True
        )

    venv = ROOT / ".venvs" / f"jax-{jax}"
    print(f"\n== JAX {jax} on Python {python}: {interpreter}", flush=True)
    environment = {**os.environ, "PYTHON": interpreter}
    synced = subprocess.run([ENV_TOOL, "sync", str(venv), "test"], env=environment)
    if synced.returncode:
        return Result(jax, python, problem="its environment could not be made")

    venv_python = str(venv / "bin" / "python")
    query = (
        "import importlib.metadata, platform;"
        "print(importlib.metadata.version('jax'), platform.python_version())"
    )
    found = subprocess.run(
        [venv_python, "-c", query], capture_output=True, text=True, check=True
    )
    found_jax, python = found.stdout.split()
    if not found_jax.startswith(f"{jax}."):
        return Result(found_jax, python, problem=f"JAX {jax} was expected")

    report = venv / "junit.xml"
    report.unlink(missing_ok=True)
    tests = subprocess.run(
        [venv_python, "-m", "pytest", f"--junitxml={report}", *pytest_args], cwd=ROOT
    )
    counts = count_outcomes(report) if report.exists() else collections.Counter()
    problem = ""
    # 1 is pytest's code for failed tests, which the counts show already.
    if tests.returncode not in (0, 1) or (tests.returncode and not counts["failed"]):
        problem = f"pytest exited with {tests.returncode}"
    elif not counts["passed"] and not counts["failed"]:
        problem = "no test ran"
    return Result(
        found_jax,
        python,
        passed=counts["passed"],
        failed=counts["failed"],
        skipped=counts["skipped"],
        problem=problem,
    )


def print_table(results: list[Result]) -> None:
    """Prints one line for each JAX, and the total last."""
    rows = [("JAX", "Python", "Tests")]
    rows += [(result.jax, result.python, result.outcome) for result in results]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        cells = zip(row, widths, strict=True)
        print("  ".join(cell.ljust(width) for cell, width in cells).rstrip())
    passed, failed, skipped = (
        sum(getattr(result, name) for result in results)
        for name in ("passed", "failed", "skipped")
    )
    print(f"\n{passed} passed, {failed} failed, {skipped} skipped")


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(
        description="Run the tests on every supported JAX.",
        epilog="Arguments after -- are passed to pytest.",
    )
    parser.add_argument(
        "--require",
        action="store_true",
        help="fail when the interpreter of a supported JAX is missing",
    )
    parser.add_argument(
        "--jax",
        action="append",
        choices=SUPPORTED,
        help="test this JAX only (may be repeated)",
    )
    split = argv.index("--") if "--" in argv else len(argv)
    options = parser.parse_args(argv[:split])
    chosen = options.jax or list(SUPPORTED)
    results = [
        run_tests(jax, python, argv[split + 1 :])
        for jax, python in SUPPORTED.items()
        if jax in chosen
    ]
    print_table(results)
    required = [r for r in results if options.require or not r.interpreter_missing]
    return 0 if required and all(result.ok for result in required) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
