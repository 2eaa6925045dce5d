# Everything a developer runs. `make demo` and `make test` work on a fresh clone: they make .venv.

PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2
CODE     = linnet tests benchmarks examples
QUIET    = --quiet --disable-pip-version-check

# Most of the time goes into compiling, so `make test` compiles with few optimizations; test-all and
# test-newest compile as users do.
SAVING   = JAX_DISABLE_MOST_OPTIMIZATIONS=1
# QUICK=1: stop at the first failure, fewer examples a property, no slow tests.
PYTEST   = -m pytest -n $(WORKERS) --dist worksteal
ALL      = --doctest-modules tests linnet
NOT_SLOW = -m "not slow"
# What depends most on the versions of Python and JAX.
NNX      = graphlib modules pytreelib rnglib transforms variablelib
LIKELY   = tests/core tests/linen $(NNX:%=tests/nnx/%) --ignore tests/nnx/variablelib/test_placement.py
ifdef QUICK
  export HYPOTHESIS_PROFILE = quick
  PYTEST += -x
endif

.DEFAULT_GOAL = help
.PHONY: help setup demo test test-all test-newest test-flax lint fmt bench docs clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.ready ## make .venv, with the pinned versions (the other targets do it when needed)

demo: $(VENV)/.ready ## train a network on handwritten digits, with pictures of it (under a minute)
	$(VENV)/bin/python examples/digits.py

test: lint ## format, lint and type checks, doctests and all tests but the slow ones
	$(SAVING) $(VENV)/bin/python $(PYTEST) $(ALL) $(NOT_SLOW)

test-all: lint ## the same, with the slow tests and more examples a property
	HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-full} $(VENV)/bin/python $(PYTEST) $(ALL)

test-newest: .venv-newest/.ready ## all tests on the newest Python and the newest JAX (QUICK=1: a subset)
	.venv-newest/bin/python $(PYTEST) $(if $(QUICK),$(LIKELY) $(NOT_SLOW),$(ALL))

test-flax: .venv-bench/.ready ## programs run on Flax and on Linnet, which must do the same
	.venv-bench/bin/python -m pytest -n $(WORKERS) --tb=line tests/against_flax

lint: $(VENV)/.ready ## format, lint and type checks alone
	$(VENV)/bin/ruff format --check $(CODE)
	$(VENV)/bin/ruff check $(CODE)
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

fmt: $(VENV)/.ready ## format the code and mend what the linter can mend
	$(VENV)/bin/ruff check --fix-only $(CODE)
	$(VENV)/bin/ruff format $(CODE)

bench: .venv-bench/.ready ## compare with the peers: import time, state API, transforms, layers
	.venv-bench/bin/python benchmarks/import_time.py
	.venv-bench/bin/python benchmarks/state_api.py
	.venv-bench/bin/python benchmarks/transforms.py
	.venv-bench/bin/python benchmarks/layers.py
	.venv-bench/bin/python benchmarks/training.py
	.venv-bench/bin/python benchmarks/linen.py
	.venv-bench/bin/python benchmarks/loop.py
	.venv-bench/bin/python benchmarks/storage.py
	.venv-bench/bin/python benchmarks/weights.py

docs: $(VENV)/.docs ## write the API pages to site/
	$(VENV)/bin/pdoc --docformat google --output-directory site linnet

clean: ## remove the environments and everything that was built
	rm -rf .venv .venv-newest .venv-bench build dist site .pytest_cache .ruff_cache .hypothesis

# The environments. Each is made once, and again when its stamp is older than what it was made from.

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Linnet needs Python 3.11 or newer, but $(PYTHON) is `$(PYTHON) --version 2>&1`."; \
	  echo "Fix: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install $(QUIET) -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.ready
	$(VENV)/bin/python -m pip install $(QUIET) -c constraints.txt -e '.[docs]'
	@touch $@

.venv-bench/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install $(QUIET) -c constraints.txt -e '.[bench]'
	@touch $@

# No constraints here: the newest of everything.
.venv-newest/.ready: pyproject.toml
	@.ci/newest-python >/dev/null || { echo "make test-newest: no python3.13 or python3.12 found."; exit 1; }
	"$$(.ci/newest-python)" -m venv --clear .venv-newest
	.venv-newest/bin/python -m pip install $(QUIET) -e '.[test]'
	@touch $@
