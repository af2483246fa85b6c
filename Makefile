# Two commands: `make demo` and `make test`. Each sets up everything that it needs in .venv first.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Two processes share two cores in many places; one thread each is faster than two that wait for one another.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint types unit bench docs clean

demo: $(READY)
	OMP_NUM_THREADS=2 $(BIN)/python examples/digits.py

test: lint types unit

lint: $(READY)
	$(BIN)/ruff check package tests examples benchmarks docs
	$(BIN)/ruff format --check package tests examples benchmarks docs

types: $(READY)
	$(BIN)/mypy

unit: $(READY)
	$(BIN)/python -m pytest

# The figures of README.md and docs/explanation: not part of `make test`, because times are no tests.
bench: $(READY)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/distributed.py
	$(BIN)/python benchmarks/checkpoint.py

docs: $(READY)
	$(BIN)/python docs/generate_reference.py

# torch first and pinned, so that the package's own requirement finds it and brings in no other build.
$(READY): setup.cfg setup.py Makefile tests/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c tests/constraints.txt -e '.[test,examples]'
	touch $(READY)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
