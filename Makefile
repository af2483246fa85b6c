# `make demo`, `make test` and the other targets set up what they need first: in .venv, for XLA's strategies in .venv-xla,
# for the documentation alone in .venv-docs, for experiment trackers and Ray in .venv-trackers, for the libraries built on
# Lightning in the folders of .venv-libraries, for the lowest versions of an extra's packages in the folders of .venv-lowest,
# and for the libraries that ours is measured beside in .venv-bench. `make gpu` installs nothing: it runs with the torch of
# a machine with an NVIDIA GPU.

PYTHON ?= python3
TORCH ?= torch==2.13.0
XLA ?= torch==2.9.0 torch_xla==2.9.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VENV_XLA := .venv-xla
BIN_XLA := $(VENV_XLA)/bin
READY_XLA := $(VENV_XLA)/.ready
VENV_DOCS := .venv-docs
BIN_DOCS := $(VENV_DOCS)/bin
READY_DOCS := $(VENV_DOCS)/.ready
VENV_TRACKERS := .venv-trackers
BIN_TRACKERS := $(VENV_TRACKERS)/bin
READY_TRACKERS := $(VENV_TRACKERS)/.ready
VENV_LIBRARIES := .venv-libraries
# Those that go into one environment: a file of tests/integrations/lightning/libraries each.
LIBRARIES ?= audio images projects science series tables
VENV_LOWEST := .venv-lowest
# Extras whose lowest versions are tested, an environment each or for those that resolve together; accelerate's is that of
# transformers. Their tests, less those of what newer releases brought: weight averages, the command line, which needs
# jsonargparse 4.53, the tables of transformers' newest options, and a setting of wandb's by which a test waits less.
# MLflow's server and a script that searches over Ray are tested with the newest alone, by make trackers.
LOWEST ?= deepspeed hub lightning mlflow ray search servers sklearn tools torchao trackers transformers
LOWEST_EXTRAS_mlflow := azureml,mlflow
LOWEST_EXTRAS_search := pandas,plots,search
LOWEST_EXTRAS_servers := aim,clearml,neptune
LOWEST_EXTRAS_tools := completion,examples,pandas,plots,remote,rich,s3,stats
LOWEST_EXTRAS_trackers := codecarbon,comet,dvclive,swanlab,trackio,wandb
# What the tests need beside the extra, of versions that take the lowest numpy, botocore, matplotlib and MLflow.
LOWEST_PACKAGES_mlflow := 'sqlalchemy<2.1'
LOWEST_PACKAGES_ray := 'pyarrow<21'
LOWEST_PACKAGES_search := 'pyparsing<3.3'
LOWEST_PACKAGES_servers := plotly
LOWEST_PACKAGES_tools := aiobotocore==2.26.0 boto3==1.41.5 flask flask-cors ipykernel 'moto[s3]' nbclient nbformat 'pyparsing<3.3'
LOWEST_PACKAGES_transformers := 'datasets<2.20' peft 'pyarrow<21'
LOWEST_TESTS_deepspeed := tests/strategies/deepspeed/test_config.py
LOWEST_TESTS_hub := tests/integrations/hub/test_hub.py
LOWEST_TESTS_lightning := $(addprefix tests/integrations/lightning/test_,callbacks.py checkpoint.py data.py doors.py task.py) -k "not average"
LOWEST_TESTS_mlflow := tests/integrations/trackers/test_mlflow.py -m "not extended" -k "registered or (killed and not lightning)"
LOWEST_TESTS_ray := tests/integrations/ray -m "not extended" -k "not script"
LOWEST_TESTS_search := tests/integrations/optuna -k "not command"
LOWEST_TESTS_servers := tests/integrations/trackers -m "not extended" -k "not command"
LOWEST_TESTS_sklearn := tests/integrations/sklearn -m "not nightly"
LOWEST_TESTS_tools := $(addprefix tests/checkpoint/storage/test_,remote.py s3.py) $(addprefix tests/callbacks/test_,notebook_results.py progress_bar.py) \
	$(addprefix tests/integrations/,matplotlib psutil) tests/loggers/test_media.py \
	tests/cli/test_runs.py $(addprefix tests/cli/test_main.py::test_a_shell_,completes_words_arguments_and_values can_read_what_completes) \
	-m "not (nightly or extended)"
LOWEST_TESTS_torchao := tests/task/optim/test_quantized.py
LOWEST_TESTS_trackers := tests/integrations/trackers -m "not extended" -k "not command and not (wandb and killed)"
LOWEST_TESTS_transformers := tests/strategies/accelerate/test_accelerate.py \
	$(addprefix tests/integrations/transformers/test_,trainer.py export.py checkpoint_folders.py) \
	-W "ignore:Deprecated in 0.9.0:DeprecationWarning"
VENV_BENCH := .venv-bench
BIN_BENCH := $(VENV_BENCH)/bin
READY_BENCH := $(VENV_BENCH)/.ready
# Arguments of benchmarks/run.py, such as BENCH="--quick", and of tests/gpu/run.py.
BENCH ?=
GPU ?=

# Without it, Material for MkDocs prints news of other projects.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN_DOCS)/python -m mkdocs

# How many tests run at a time. More than there are cores, because many tests wait for a clock or for a process to start.
WORKERS ?= 4
# Further options of pytest, such as TESTS="tests/data -k resume".
TESTS ?=
# ORDER=reverse runs the last test first.
ORDER ?= forward
# How often the tests run, one time after the other.
TIMES ?= 1

# Two processes share two cores in many places; one thread each is faster than two that wait for one another.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-landing check checked-tests test-nightly test-extended test-for faults lint types unit xla xla-landing trackers libraries lowest gpu \
	bench docs docs-serve docs-version clean

demo: $(READY)
	OMP_NUM_THREADS=2 $(BIN)/python examples/digits.py

# Each change, before every commit: 8 minutes on two cores, with set-up.
test: lint types unit

lint: $(READY)
	$(BIN)/ruff check package tests examples benchmarks docs
	$(BIN)/ruff format --check package tests examples benchmarks docs

types: $(READY)
	$(BIN)/mypy

# The tests of a selection of markers; a second argument names another environment's programs.
pytest = for each in $$(seq $(TIMES)); do \
	$(or $(2),$(BIN))/python -m pytest --numprocesses $(WORKERS) --dist worksteal --durations 25 \
	$(if $(filter reverse,$(ORDER)),--reverse) $(TESTS) -m "$(1)" || exit 1; done

unit: $(READY)
	$(call pytest,not (landing or nightly or extended))

# torch_xla's CPU client is there for Linux on x86-64 only.
XLA_LANDING := $(if $(filter Linux-x86_64,$(shell uname -sm | tr ' ' -)),xla-landing)

# Each change once, before it lands.
check checked-tests test-landing test-nightly: export PAGES := all
test-landing: $(READY) $(XLA_LANDING)
	$(call pytest,landing)

# `make test` and `make test-landing` in one: each process of pytest imports the tests once, which takes it half a minute,
# and types are checked beside them.
check: lint $(XLA_LANDING)
	$(MAKE) --jobs=2 types checked-tests

checked-tests: $(READY)  # tests call make too, whose own settings are not for theirs
	unset MAKEFLAGS MFLAGS MAKELEVEL; $(call pytest,not (nightly or extended))

# Matrices, all families of models, notebooks, XLA whole, campaigns at a tenth of their length.
test-nightly: $(READY) xla trackers libraries lowest
	$(call pytest,nightly)

# Campaigns at their full length, for an hour or so.
test-extended: $(READY)
	$(call pytest,extended)

# The nightly tests of what has changed since a revision: make test-for CHANGE=HEAD~3
test-for: $(READY)
	$(if $(CHANGE),,$(error CHANGE is missing, such as make test-for CHANGE=HEAD~3))
	$(BIN)/python -m tests.support.changed $(CHANGE)

# Plant one-line faults in a copy of the package, and fail where a test that should see one does not.
faults: $(READY)
	$(BIN)/python -m tests.faults.run $(FAULTS)

# Seven tests, where what they depend on has changed since tests/xla/passed.txt was written.
xla-landing:
	@$(PYTHON) tests/xla/passed.py || $(MAKE) xla-few

xla-few: $(READY_XLA)
	$(BIN_XLA)/python -m pytest -m landing tests/xla
	$(PYTHON) tests/xla/passed.py --write

xla: $(READY_XLA)
	$(BIN_XLA)/python -m pytest --durations 25 tests/xla

# All tests of trackers and of Ray, with the packages that need other versions of what the other tests need, such as mlflow.
trackers: $(READY_TRACKERS)
	$(BIN_TRACKERS)/python -m pytest -n0 --durations 25 tests/integrations/trackers tests/integrations/ray

# 36 modules of 13 libraries built on Lightning, and projects with hydra and with LightningCLI; make libraries
# LIBRARIES=tables runs one group.
libraries: $(LIBRARIES:%=libraries-%)

libraries-%: $(VENV_LIBRARIES)/%/.ready
	$(VENV_LIBRARIES)/$*/bin/python -m pytest -n0 -rs -m nightly \
		tests/integrations/lightning/test_libraries.py tests/integrations/lightning/test_projects.py

# The tests of some extras with the lowest versions that setup.cfg allows; make lowest LOWEST=search tests one extra.
lowest: $(LOWEST:%=lowest-%)

lowest-%: $(VENV_LOWEST)/%/.ready
	$(VENV_LOWEST)/$*/bin/python -m pytest -n0 -rs -m "not (landing or nightly or extended)" $(LOWEST_TESTS_$*)

# On a machine with an NVIDIA GPU: its tests and benchmarks/gpu; the report is in the folder OUT. PYTHONPATH may bring
# packages, and GPU="--size small" tries the program out on a CPU.
gpu:
	$(PYTHON) tests/gpu/run.py $(GPU)

# The figures of README.md and docs/explanation: not part of `make test`, because times are no tests. The benchmarks' own
# tests come first.
bench: $(READY_BENCH) $(READY)
	$(BIN)/python -m pytest -m nightly tests/benchmarks
	$(BIN_BENCH)/python benchmarks/run.py $(BENCH)

# The documentation site, in build/docs; a dead link, a dead anchor or a public object without a docstring is an error.
docs: $(READY_DOCS)
	$(MKDOCS) build --config-file docs/mkdocs.yml

docs-serve: $(READY_DOCS)
	$(MKDOCS) serve --config-file docs/mkdocs.yml

# The site of a release, committed to the branch gh-pages as one more version: make docs-version VERSION=0.2
docs-version: $(READY_DOCS)
	$(if $(VERSION),,$(error VERSION is missing, such as make docs-version VERSION=0.2))
	PATH="$(CURDIR)/$(BIN_DOCS):$$PATH" NO_MKDOCS_2_WARNING=1 $(BIN_DOCS)/mike deploy --config-file docs/mkdocs.yml \
		--update-aliases $(VERSION) latest
	PATH="$(CURDIR)/$(BIN_DOCS):$$PATH" NO_MKDOCS_2_WARNING=1 $(BIN_DOCS)/mike set-default --config-file docs/mkdocs.yml latest

# torch first and pinned, so that the package's own requirement finds it and brings in no other build.
$(READY): setup.cfg setup.py Makefile tests/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c tests/constraints.txt -e '.[test,examples,docs]'
	touch $(READY)

# torch_xla goes with one version of torch only, of which PyPI has the build for CUDA: no dependencies, for those are
# CUDA's libraries, in whose place stand-ins are compiled.
$(READY_XLA): setup.cfg setup.py Makefile tests/constraints.txt tests/xla/cuda_stubs.py
	test -x $(BIN_XLA)/python || $(PYTHON) -m venv $(VENV_XLA)
	$(BIN_XLA)/python -m pip install --quiet --disable-pip-version-check -c tests/constraints.txt \
		filelock typing_extensions sympy networkx jinja2 fsspec absl-py pyyaml requests packaging setuptools \
		cloudpickle hypothesis jsonargparse numpy pytest pytest-rerunfailures safetensors tensorboard tqdm xxhash
	$(BIN_XLA)/python -m pip install --quiet --disable-pip-version-check --no-deps $(XLA) \
		-c tests/constraints.txt torchmetrics lightning-utilities
	$(BIN_XLA)/python tests/xla/cuda_stubs.py $$($(BIN_XLA)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
	$(BIN_XLA)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $(READY_XLA)

$(READY_DOCS): setup.cfg setup.py Makefile tests/constraints.txt
	test -x $(BIN_DOCS)/python || $(PYTHON) -m venv $(VENV_DOCS)
	$(BIN_DOCS)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN_DOCS)/python -m pip install --quiet --disable-pip-version-check -c tests/constraints.txt -e '.[docs]'
	touch $(READY_DOCS)

$(READY_TRACKERS): setup.cfg setup.py Makefile
	test -x $(BIN_TRACKERS)/python || $(PYTHON) -m venv $(VENV_TRACKERS)
	$(BIN_TRACKERS)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN_TRACKERS)/python -m pip install --quiet --disable-pip-version-check -e '.[trackers]'
	touch $(READY_TRACKERS)

# torchaudio's extension is built for CUDA and does not load beside torch's CPU build; torchaudio also works without it.
.PRECIOUS: $(VENV_LIBRARIES)/%/.ready
$(VENV_LIBRARIES)/%/.ready: setup.cfg Makefile tests/integrations/lightning/libraries/base.txt \
		tests/integrations/lightning/libraries/%.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -e . \
		-r tests/integrations/lightning/libraries/$*.txt
	rm -f $(@D)/lib/python*/site-packages/torchaudio/lib/*.so
	touch $@

.PRECIOUS: $(VENV_LOWEST)/%/.ready
$(VENV_LOWEST)/%/.ready: setup.cfg setup.py Makefile tests/support/lowest.py
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(PYTHON) tests/support/lowest.py $(or $(LOWEST_EXTRAS_$*),$*) > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $(@D)/constraints.txt -e '.[$(or $(LOWEST_EXTRAS_$*),$*)]' \
		$(LOWEST_PACKAGES_$*) cloudpickle hypothesis pytest pytest-rerunfailures pytest-xdist
	touch $@

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
	rm -rf $(VENV) $(VENV_XLA) $(VENV_DOCS) $(VENV_TRACKERS) $(VENV_LIBRARIES) $(VENV_LOWEST) $(VENV_BENCH) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
