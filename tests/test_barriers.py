"""The flag that keeps optimization barriers alive on older jaxlib, and a light import.

XLA reads its flags once, so each of these runs in a process of its own.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from remat import _barriers
from remat._barriers import with_passes_disabled
from remat._jax import JAXLIB_VERSION

PASSES = "cse_barrier_expander,small-while-loop-hoisting"
DISABLED = f"--xla_disable_hlo_passes={PASSES}"

deletes_barriers = pytest.mark.skipif(
    JAXLIB_VERSION >= (0, 11), reason="this jaxlib keeps barriers by itself"
)
keeps_barriers = pytest.mark.skipif(
    JAXLIB_VERSION < (0, 11), reason="this jaxlib needs the flag"
)


def run(script: str, **environment: str) -> Any:
    """What `script` prints, as JSON; warnings that it doesn't catch are errors."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "REMAT_SET_XLA_FLAGS", "JAX_PLATFORMS")
    }
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={**inherited, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


FLAGS = """
import json, os
import remat
print(json.dumps(os.environ.get("XLA_FLAGS")))
"""


@deletes_barriers
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, DISABLED),
        (
            {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
            f"--xla_force_host_platform_device_count=2 {DISABLED}",
        ),
        (
            {"XLA_FLAGS": "--xla_disable_hlo_passes=algsimp"},
            f"--xla_disable_hlo_passes=algsimp,{PASSES}",
        ),
        ({"XLA_FLAGS": DISABLED}, DISABLED),
        (
            {"XLA_FLAGS": "--xla_disable_hlo_passes=cse_barrier_expander"},
            DISABLED,
        ),
        ({"REMAT_SET_XLA_FLAGS": "1"}, DISABLED),
        ({"REMAT_SET_XLA_FLAGS": "0"}, None),
        ({"REMAT_SET_XLA_FLAGS": "False"}, None),
        # The flag would hold for other backends too, whose compilers need the pass.
        ({"JAX_PLATFORMS": "cuda,cpu"}, None),
    ],
    ids=str,
)
def test_import_sets_the_flag(given, expected):
    assert run(FLAGS, **given) == expected


@deletes_barriers
def test_flags_in_a_file_are_left_alone(tmp_path):
    # XLA takes what doesn't start with a dash for the name of a file of flags.
    file = tmp_path / "flags.txt"
    file.write_text("--xla_force_host_platform_device_count=2\n")
    script = """
import json, warnings
import remat, jax
print(json.dumps(jax.device_count()))
"""
    assert run(script, XLA_FLAGS=str(file)) == 2


@keeps_barriers
@pytest.mark.parametrize(
    "flags", [None, "--xla_force_host_platform_device_count=2"], ids=str
)
def test_import_touches_nothing_where_barriers_survive(flags):
    assert run(FLAGS, **({} if flags is None else {"XLA_FLAGS": flags})) == flags


PREPARE = """
import json, warnings
import jax, jax.numpy as jnp
{start}
import remat

def loss(w):
    for _ in range(3):
        w = jnp.sin(w @ w)
    return jnp.sum(w)

w = jnp.eye(4)
f = remat.checkpoint(loss, prevent_cse={prevent_cse})
reports = []
"""
START = "jax.block_until_ready(jnp.ones(2) + 1)"
BACKWARD = """
def report(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    reports.append([
        [w.category.__name__, str(w.message), w.filename]
        for w in caught if issubclass(w.category, remat.BarrierWarning)
    ])

report(lambda: f(w))
report(lambda: jax.jit(f)(w))
report(lambda: jax.jit(jax.grad(loss))(w))
report(lambda: jax.jit(jax.value_and_grad(f))(w))
report(lambda: jax.grad(f)(w))
report(lambda: jax.jit(jax.grad(remat.checkpoint(lambda w: loss(2 * w))))(w))
print(json.dumps(reports))
"""


def reports(start: str = START, prevent_cse: bool = True, **environment: str) -> Any:
    prepared = PREPARE.format(start=start, prevent_cse=prevent_cse)
    return run(prepared + BACKWARD, **environment)


@deletes_barriers
def test_backend_that_had_started_warns_once_at_the_first_backward_pass():
    *forward, first, eager, other = reports()
    assert forward == [[], [], []]
    ((category, text, filename),) = first
    assert category == "BarrierWarning"
    version = ".".join(map(str, JAXLIB_VERSION))
    assert text == (
        f"On the CPU, jaxlib {version} deletes the barriers that keep recomputation "
        "apart, so rematerialization will not lower the peak memory; JAX had already "
        "started its backend when remat was imported. Import remat before the first "
        "JAX computation, or set the environment variable "
        f"XLA_FLAGS={DISABLED} before Python starts, or use jaxlib 0.11 or newer. "
        "REMAT_SET_XLA_FLAGS=0 silences this."
    )
    assert filename == "<string>"
    assert eager == other == []


@deletes_barriers
def test_eager_backward_pass_warns_too():
    prepared = PREPARE.format(start=START, prevent_cse=True)
    script = prepared + BACKWARD.replace(
        "report(lambda: jax.jit(jax.value_and_grad(f))(w))\n", ""
    )
    *_, eager, other = run(script)
    assert [category for category, _, _ in eager] == ["BarrierWarning"]
    assert other == []


@deletes_barriers
@pytest.mark.parametrize(
    ("start", "environment"),
    [
        ("", {}),
        (START, {"REMAT_SET_XLA_FLAGS": "0"}),
        (START, {"XLA_FLAGS": DISABLED}),
    ],
    ids=["imported first", "refused", "set by the user"],
)
def test_no_warning_where_there_is_nothing_to_mend(start, environment):
    assert not any(reports(start, **environment))


@deletes_barriers
def test_no_warning_where_no_barrier_is_emitted():
    *others, last = reports(prevent_cse=False)
    assert not any(others)
    # The last one is of a function that does ask for barriers.
    assert len(last) == 1


@keeps_barriers
def test_no_warning_where_barriers_survive():
    assert not any(reports())


@deletes_barriers
def test_flag_makes_recomputation_survive():
    script = (
        PREPARE.format(start="", prevent_cse=True)
        + """
def sines(f):
    text = jax.jit(jax.value_and_grad(f)).lower(w).compile().as_text()
    return text.count(" sine(")

print(json.dumps([sines(loss), sines(f)]))
"""
    )
    without, ours = run(script)
    assert without < ours
    without, refused = run(script, REMAT_SET_XLA_FLAGS="0")
    assert without == refused


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", DISABLED),
        ("  ", DISABLED),
        ("--a=1 --b", f"--a=1 --b {DISABLED}"),
        ("--xla_disable_hlo_passes=x", f"--xla_disable_hlo_passes=x,{PASSES}"),
        (
            "--xla_disable_hlo_passes=x,y --b",
            f"--b --xla_disable_hlo_passes=x,y,{PASSES}",
        ),
        ("--a  --xla_disable_hlo_passes=", f"--a {DISABLED}"),
        (
            "--xla_disable_hlo_passes_except=x",
            f"--xla_disable_hlo_passes_except=x {DISABLED}",
        ),
    ],
)
def test_pass_is_added_to_the_flags(flags, expected):
    assert with_passes_disabled(flags) == expected


def test_names_that_users_set():
    assert _barriers.SWITCH == "REMAT_SET_XLA_FLAGS"
    assert ",".join(_barriers.PASSES) == PASSES


IMPORT = """
import json, sys
import jax
before = set(sys.modules)
import remat
from remat._jax import backends_started
print(json.dumps([sorted(set(sys.modules) - before), backends_started()]))
"""


def test_import_is_light_and_starts_no_backend():
    loaded, started = run(IMPORT)
    assert not started
    heavy = {"matplotlib", "ortools", "pandas", "rich", "scipy"}
    assert not heavy.intersection(name.split(".")[0] for name in loaded)
    assert any(name.startswith("remat") for name in loaded)
