# Needs make, Python 3.11 or newer and a package index; every target makes the
# environment that it needs. `make help` lists the targets.

# Interpreter (name or path); empty: the first suitable one that tools/env finds.
PYTHON ?=
# The environment of all targets but test-matrix, which has one for each JAX.
VENV ?= .venv
# Passed on to the program that the target runs.
ARGS ?=

# Tests run in parallel, in a few processes since each compiles with several threads.
PYTEST_ADDOPTS ?= -n auto --maxprocesses 4

export PYTHON PYTEST_ADDOPTS
unexport PYTHONHOME PYTHONPATH VIRTUAL_ENV

run = $(VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help demo test test-random test-matrix lint format bench wheel lock clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | \
	while IFS='|' read -r target text; do printf '%-18s %s\n' "$$target" "$$text"; done
	@echo
	@echo "PYTHON=python3.12 chooses the interpreter, ARGS='...' adds arguments:"
	@echo "  make test ARGS='tests/test_layers.py -x'"

demo: ## train a small GPT with and without rematerialization
	@tools/env sync $(VENV) bench
	$(run) examples/train_gpt.py $(ARGS)

test: ## run the tests on one JAX
	@tools/env sync $(VENV) test
	$(run) -m pytest $(ARGS)

test-random: ## compare a thousand random programs with the undecorated ones
	@tools/env sync $(VENV) test
	RANDOM_PROGRAMS=$${RANDOM_PROGRAMS:-1000} \
	$(run) -m pytest tests/test_random_programs.py $(ARGS)

test-matrix: ## run the tests on every supported JAX whose Python is found
	@tools/env uv --version
	.venvs/uv/bin/python tools/test_matrix.py $(ARGS)

lint: ## check style, format and types
	@tools/env sync $(VENV) dev
	$(run) -m ruff check
	$(run) -m ruff format --check
	$(run) -m pyright --pythonpath $(run)

format: ## format the code and apply the safe fixes
	@tools/env sync $(VENV) dev
	$(run) -m ruff check --fix
	$(run) -m ruff format

bench: ## measure the compiled peak memory against jax.checkpoint
	@tools/env sync $(VENV) bench
	$(run) benchmarks/checkpoint_memory.py $(ARGS)

wheel: ## build the wheel and import it in a fresh environment
	@tools/env sync $(VENV) test
	tools/check_wheel $(VENV)

lock: ## bring uv.lock up to date with pyproject.toml
	tools/env uv lock --no-config --default-index https://pypi.org/simple $(ARGS)

clean: ## remove the environments and everything else that was built
	rm -rf .venv .venvs build dist .pytest_cache .ruff_cache .hypothesis
