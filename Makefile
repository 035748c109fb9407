# Every target sets up what it needs by itself: Python 3.11 or later, make and git are enough.
# Choose another interpreter with `make PYTHON=/path/to/python test`.

PYTHON ?=
VENV   := .venv
PY     := $(VENV)/bin/python
# -qq: errors only.
PIP    := $(PY) -m pip --disable-pip-version-check -qq

# The benchmarks are the modules that can be run; the others are what they share.
BENCHMARKS := $(basename $(notdir $(shell grep -ls '^if __name__ == "__main__"' experiments/benchmarks/*.py)))
# One thread per worker: more would only compete for the same cores.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help test test-fast test-without-data torture lint format wheel-check demo bench clean distclean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' Makefile

test: lint ## lint, type check and run all tests
	$(PYTEST)

test-fast: $(VENV)/dev.stamp ## run the tests that take a moment, without lint
	$(PYTEST) -m "not slow"

test-without-data: $(VENV)/dev.stamp ## run the tests that need data, with none to be had: all are skipped
	TORCH_ANDERSON_DATA=/nonexistent $(PYTEST) -m data

torture: $(VENV)/dev.stamp ## 10,000 random sequences, drawn anew; takes hours (fewer: SEQUENCES=1000)
	SEQUENCES=$(or $(SEQUENCES),10000) $(PYTEST) -rP tests/test_random_sequences.py

lint: $(VENV)/dev.stamp ## ruff (lint, format), mypy and import-linter, changing nothing
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	PYTHONPATH=. $(VENV)/bin/lint-imports --no-cache

format: $(VENV)/dev.stamp ## format the code and mend what ruff can mend
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

wheel-check: $(VENV)/dev.stamp ## build the wheel and try it in an empty environment: torch and nothing else
	$(PY) .ci/wheel_check.py

demo: $(VENV)/experiments.stamp ## an equation solved, three experiments in small: tables here, pages to read
	$(PY) -m experiments.demo

bench: $(addprefix bench-,$(BENCHMARKS)) ## run all benchmarks; one of them: make bench-<name>

bench-%: $(VENV)/dev.stamp
	OMP_PROC_BIND=true $(PY) -m experiments.benchmarks.$*

clean: ## remove caches and build products
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis lightning_logs
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## clean, and remove the virtual environment
	rm -rf $(VENV)

# What is installed is renewed when the declared dependencies or their pins change.
$(VENV)/experiments.stamp: pyproject.toml constraints.txt
	$(call install,experiments)
	@touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt
	$(call install,experiments$(comma)dask$(comma)dev)
	@touch $(VENV)/experiments.stamp $@

comma := ,

# $(call install,extras): the project with these extras, in an environment that is made if there is no working one.
define install
@$(PY) -m pip --version >/dev/null 2>&1 || { $(find_python); \
	echo "Creating $(VENV) with $$python"; "$$python" -m venv --clear $(VENV); }
@echo "Installing torch-anderson[$(1)] into $(VENV) (takes a minute or two)"
@$(PIP) install -c constraints.txt setuptools
@$(PIP) install -c constraints.txt --no-build-isolation -e '.[$(1)]'
endef

# Leaves the first candidate that runs and is recent enough in the shell variable `python`.
define find_python
python=; \
for candidate in $(or $(PYTHON),python3.11 python3); do \
	"$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && python="$$candidate" && break; \
done; \
if [ -z "$$python" ]; then \
	echo "torch-anderson needs Python 3.11 or later; found: $$($(or $(PYTHON),python3) --version 2>&1 || true)" >&2; \
	echo "Install it, or name one: make PYTHON=/path/to/python" >&2; \
	exit 1; \
fi
endef
