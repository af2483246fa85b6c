# Three commands: `make demo`, `make test` and `make bench`. Each sets up everything that it needs first: in .venv, for
# XLA's strategies in .venv-xla, and for the libraries that ours is measured beside in .venv-bench.

PYTHON ?= python3
TORCH ?= torch==2.13.0
XLA ?= torch==2.9.0 torch_xla==2.9.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VENV_XLA := .venv-xla
BIN_XLA := $(VENV_XLA)/bin
READY_XLA := $(VENV_XLA)/.ready
VENV_BENCH := .venv-bench
BIN_BENCH := $(VENV_BENCH)/bin
READY_BENCH := $(VENV_BENCH)/.ready
# Arguments of benchmarks/run.py, such as BENCH="--quick".
BENCH ?=

# How many tests run at a time. Many start several processes themselves: more workers than cores gain nothing.
WORKERS ?= 2

# Two processes share two cores in many places; one thread each is faster than two that wait for one another.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint types unit xla bench docs clean

demo: $(READY)
	OMP_NUM_THREADS=2 $(BIN)/python examples/digits.py

# torch_xla's CPU client, which these tests run on, comes for Linux on x86-64 only.
test: lint types unit $(if $(filter Linux-x86_64,$(shell uname -sm | tr ' ' -)),xla)

lint: $(READY)
	$(BIN)/ruff check package tests examples benchmarks docs
	$(BIN)/ruff format --check package tests examples benchmarks docs

types: $(READY)
	$(BIN)/mypy

unit: $(READY)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

xla: $(READY_XLA)
	$(BIN_XLA)/python -m pytest tests/xla

# The figures of README.md and docs/explanation: not part of `make test`, because times are no tests.
bench: $(READY_BENCH)
	$(BIN_BENCH)/python benchmarks/run.py $(BENCH)

docs: $(READY)
	$(BIN)/python docs/generate_reference.py

# torch first and pinned, so that the package's own requirement finds it and brings in no other build.
$(READY): setup.cfg setup.py Makefile tests/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c tests/constraints.txt -e '.[test,examples]'
	touch $(READY)

# torch_xla goes with one version of torch only, of which PyPI has the build for CUDA: no dependencies, for those are
# CUDA's libraries, in whose place stand-ins are compiled.
$(READY_XLA): setup.cfg setup.py Makefile tests/constraints.txt tests/xla/cuda_stubs.py
	test -x $(BIN_XLA)/python || $(PYTHON) -m venv $(VENV_XLA)
	$(BIN_XLA)/python -m pip install --quiet --disable-pip-version-check -c tests/constraints.txt \
		filelock typing_extensions sympy networkx jinja2 fsspec absl-py pyyaml requests packaging setuptools \
		numpy pytest safetensors tensorboard tqdm xxhash
	$(BIN_XLA)/python -m pip install --quiet --disable-pip-version-check --no-deps $(XLA) \
		-c tests/constraints.txt torchmetrics lightning-utilities
	$(BIN_XLA)/python tests/xla/cuda_stubs.py $$($(BIN_XLA)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
	$(BIN_XLA)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $(READY_XLA)

# Composer goes without its dependencies into a folder of its own, for the reasons in composer.txt; where it cannot be
# had, the others are measured.
$(READY_BENCH): setup.cfg setup.py Makefile benchmarks/constraints.txt benchmarks/composer.txt
	test -x $(BIN_BENCH)/python || $(PYTHON) -m venv $(VENV_BENCH)
	$(BIN_BENCH)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN_BENCH)/python -m pip install --quiet --disable-pip-version-check -c benchmarks/constraints.txt -e '.[bench]'
	rm -rf $(VENV_BENCH)/composer
	-$(BIN_BENCH)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--target $(VENV_BENCH)/composer -r benchmarks/composer.txt
	touch $(READY_BENCH)

clean:
	rm -rf $(VENV) $(VENV_XLA) $(VENV_BENCH) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
