# Every target sets up what it needs. PYTHON must be 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where pip looks for local wheels, uv shall look too.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)

.PHONY: help setup demo test test-fast bench report lint clean

help:
	@echo "make demo       a real hybrid model in vLLM on this machine: vLLM alone, stock LMCache, HiState (about 6 minutes)"
	@echo "make test       every test, with real engines and servers"
	@echo "make test-fast  tests that start no engine (under 2 minutes)"
	@echo "make bench      benchmarks, each against a baseline in the same run"
	@echo "make report     every policy on the built-in workload, simulated: .report/html (about 8 minutes); TRACE=FOLDER for your own"
	@echo "make lint       ruff and mypy --strict"
	@echo "make setup      the virtual environment that all of these use ($(VENV))"

setup: $(VENV)/ready

# vLLM's CPU build wants torch's CPU build. It may lie in a local wheel folder; otherwise uv knows where it is served.
$(VENV)/ready: pyproject.toml requirements/cpu-overrides.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --override requirements/cpu-overrides.txt -e '.[cpu,dev]' \
	|| $(BIN)/uv pip install --quiet --python $(BIN)/python --torch-backend cpu --override requirements/cpu-overrides.txt -e '.[cpu,dev]'
	touch $@

demo: setup
	$(BIN)/histate demo

test: setup
	$(BIN)/python -m pytest

test-fast: setup
	$(BIN)/python -m pytest -m "not engine and not slow"

bench: setup
	$(BIN)/python -m benchmarks

# A sweep goes on where it was interrupted. Points that fail are left out of the report.
TRACE ?= builtin:agents,sessions=24
report: setup
	-$(BIN)/histate sweep $(TRACE) --output .report/results --policies main
	-$(BIN)/histate sweep $(TRACE) --output .report/results --policies ablations --capacities 1
	$(BIN)/histate report .report/results --output .report/html

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf .demo .report .pytest_cache .mypy_cache .ruff_cache .hypothesis
