# All targets run on a machine that has only Python 3.11 or newer.
# PYTHON sets the interpreter, VENV the folder of the virtual environment, WORKERS the processes of tests.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

# Packages from outside the virtual environment must not be imported.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV
export PYTHONNOUSERSITE = 1

CONSTRAINTS = requirements/constraints.txt

# Build environments must use the pins too, since deepspeed is built from source. Older releases of pip
# read PIP_CONSTRAINT there, newer ones PIP_BUILD_CONSTRAINT. DS_BUILD_OPS=0 compiles no DeepSpeed kernels.
PIP_INSTALL = PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS) DS_BUILD_OPS=0 \
	$(BIN)/python -m pip install --no-input -c $(CONSTRAINTS)

# An index of CPU builds saves gigabytes; only torch comes from it, so that it cannot replace another package.
TORCH_INDEX ?=
INSTALL_TORCH = $(if $(TORCH_INDEX),$(PIP_INSTALL) --no-deps --index-url $(TORCH_INDEX) $(shell grep '^torch==' $(CONSTRAINTS)))

# A file's tests stay in one process, since many of them share a fixture that takes seconds.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile
WORKERS ?= 2

# Another processor rounds differently. These variables have torch and its libraries of matrix products use the
# instructions of processors without AVX-512, and of those without AVX2.
KERNELS_AVX2 = ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
KERNELS_SSE4 = ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41
# AMD processors with AVX-512 multiply with oneDNN and all others with MKL. This has networks use the other one.
OTHER_MATMUL = LIT_RLHF_TEST_OTHER_MATMUL=1
NUMERIC_TESTS = $(addprefix tests/,functional invariant ppo forward rollout)

# A seed gives one order of the test files.
SEED ?= 0
SHUFFLED_TESTS = $(shell find tests -name 'test_*.py' | sort | \
	awk -v seed=$(SEED) 'BEGIN { srand(seed) } { print rand(), $$0 }' | sort -n | cut -d ' ' -f 2)

# What builds the site: MkDocs, or Zensical, which is to follow it (pip install zensical).
ENGINE ?= mkdocs

.DEFAULT_GOAL = help
.PHONY: help install test test-all test-kernels test-shuffled test-torch test-lowest test-newest lint docs budgets \
	mutate faults quickstart clean

help: ## list all targets
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' Makefile

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is required. Set an interpreter: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# On Linux, whose archives the lists of hashes are of, all that users install is checked against hashes, what builds the
# packages included. What tests need beside it comes by its version.
IS_LINUX = $(filter Linux,$(shell uname -s))
PIP_HASHED = DS_BUILD_OPS=0 $(BIN)/python -m pip install --no-input --no-deps --require-hashes
PIP_EDITABLE = $(PIP_INSTALL) $(if $(IS_LINUX),--no-build-isolation)
define INSTALL_CORE
	$(if $(TORCH_INDEX),$(INSTALL_TORCH),$(PIP_INSTALL) $(shell grep '^torch==' $(CONSTRAINTS)))
	$(if $(IS_LINUX),$(PIP_HASHED) -r requirements/build_hashes.txt)
	$(if $(IS_LINUX),$(PIP_HASHED) --no-build-isolation -r requirements/hashes.txt)
endef

# A stamp file records that an extra is installed. It is out of date once the requirements or their hashes change.
REQUIREMENTS = pyproject.toml callbacks/pyproject.toml $(CONSTRAINTS) requirements/hashes.txt requirements/build_hashes.txt

$(VENV)/.installed-test: $(REQUIREMENTS) | $(BIN)/python
	$(INSTALL_CORE)
	$(PIP_EDITABLE) -e ./callbacks -e '.[test]'
	@touch $@

$(VENV)/.installed-user: $(REQUIREMENTS) | $(BIN)/python
	$(INSTALL_CORE)
	$(PIP_EDITABLE) -e ./callbacks -e .
	@touch $@

$(VENV)/.installed-dev: $(REQUIREMENTS) | $(BIN)/python
	$(INSTALL_CORE)
	$(PIP_EDITABLE) -e ./callbacks -e '.[dev]'
	@touch $@

install: $(VENV)/.installed-test ## create the virtual environment and install the package for testing

test: install ## run the tests, except those marked slow or gpu
	$(PYTEST)

test-all: install ## run all tests but those marked gpu: before a release, about half an hour
	$(PYTEST) -m "not gpu"

test-kernels: TESTS ?= $(NUMERIC_TESTS)
test-kernels: install ## run the numeric tests, or TESTS, as on older processors and with the other matmul library
	$(KERNELS_AVX2) $(PYTEST) $(TESTS)
	$(KERNELS_SSE4) $(PYTEST) $(TESTS)
	$(OTHER_MATMUL) $(PYTEST) $(TESTS)

test-shuffled: install ## run the tests with their files in a random order: make test-shuffled SEED=7
	$(PYTEST) --no-loadscope-reorder $(SHUFFLED_TESTS)

# Another torch wants other pins, so it gets a virtual environment of its own. TRANSFORMERS, another release of that, is
# installed last: the tests ask for a newer one, and pip only warns.
TORCH_VENV = .venv-torch-$(TORCH)$(TRANSFORMERS:%=-%)
TORCH_PIP = DS_BUILD_OPS=0 $(TORCH_VENV)/bin/python -m pip install --no-input
OTHER_PINS = $(TORCH_VENV)/constraints.txt

$(TORCH_VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(TORCH_VENV)
	grep -vE '^(torch|triton|setuptools|nvidia-.*|cuda-.*)==' $(CONSTRAINTS) >$(OTHER_PINS)
	$(if $(TORCH_INDEX),$(TORCH_PIP) --no-deps --index-url $(TORCH_INDEX) torch==$(TORCH))
	$(TORCH_PIP) -c $(OTHER_PINS) -e ./callbacks -e '.[test]' torch==$(TORCH)
	$(if $(TRANSFORMERS),$(TORCH_PIP) transformers==$(TRANSFORMERS))
	@touch $@

test-torch: $(TORCH_VENV)/.installed ## run TESTS under another torch: make test-torch TORCH=2.11.0 TRANSFORMERS=5.17.0
	$(TORCH_VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(TESTS)

# uv takes torch from an index of CPU builds with UV_TORCH_BACKEND=cpu. The lowest bounds of transformers and datasets have
# to be named: the extra gguf asks for a newer transformers, and uv prefers a new fsspec to an old datasets.
RESOLUTION ?= lowest-direct
BOUNDS_VENV = .venv-$(RESOLUTION)
OVERRIDES_lowest-direct = $(shell grep -oE '(transformers|datasets)>=[0-9.]+' pyproject.toml | head -n 2 | sed 's/>/=/')

test-newest: ## run TESTS with the newest versions that the bounds allow (needs uv)
	$(MAKE) test-lowest RESOLUTION=highest

test-lowest: ## run TESTS with the lowest versions of all bounds (needs uv)
	uv venv --clear --seed --python $(PYTHON) $(BOUNDS_VENV)
	printf '%s\n' $(OVERRIDES_$(RESOLUTION)) >$(BOUNDS_VENV)/overrides.txt
	DS_BUILD_OPS=0 uv pip install --python $(BOUNDS_VENV) --resolution $(RESOLUTION) \
		--override $(BOUNDS_VENV)/overrides.txt -e '.[test,wandb,mlflow]'
	$(BOUNDS_VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(TESTS)

lint: $(VENV)/.installed-dev ## run ruff, the rules on calls, mypy --strict and the import contracts
	$(BIN)/ruff check .
	$(BIN)/python -m tests.support.call_rules
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict lit_rlhf callbacks/lit_callbacks experiments benchmarks
	$(BIN)/lint-imports

docs: install ## build the documentation site in site/; a warning is an error (ENGINE=zensical)
	$(BIN)/python docs/site_pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/$(ENGINE) build --strict

budgets: install ## report what the code costs to read: statements, one PPO iteration, methods
	$(BIN)/python -W ignore -m tests.support.budgets

mutate: install ## put small defects into formulas and update, one at a time: a test has to notice each
	$(BIN)/python -m tests.mutation $(MODULES) $(if $(CHANGED),--changed $(patsubst 1,main,$(CHANGED)))

faults: install ## fuzz what commands read, and strike every phase of each with every fault, then run it again
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.faults $(CELLS)

quickstart: $(VENV)/.installed-user ## train SFT, a reward model and PPO on the built-in world, and compare the policies
	$(BIN)/lit_rlhf quickstart

clean: ## remove the virtual environment, builds and caches
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
