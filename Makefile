# Each target is one command on a machine with Python 3.11 or newer and nothing else.
# PYTHON chooses the interpreter, VENV the virtual environment.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

# What is installed elsewhere must not leak in.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV
export PYTHONNOUSERSITE = 1

# The pins hold for the build environments too (deepspeed comes as source): older pips read the first
# variable there, newer ones the second. DS_BUILD_OPS=0: no DeepSpeed kernel is compiled in advance.
PIP_INSTALL = PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt DS_BUILD_OPS=0 \
	$(BIN)/python -m pip install --no-input -c constraints.txt

.DEFAULT_GOAL = help
.PHONY: help install test lint quickstart clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1: /p' Makefile

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# A stamp says which extras were installed from which requirements.
$(VENV)/.installed-test: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e '.[test]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@

install: $(VENV)/.installed-test ## make the virtual environment and install the package with its tests' needs

test: install ## run the tests, without those marked slow or gpu
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-dev ## ruff, mypy --strict and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict lit_rlhf callbacks/lit_callbacks
	$(BIN)/lint-imports

quickstart: install ## train SFT, reward model and PPO-max on the built-in world and compare them
	$(BIN)/lit_rlhf quickstart

clean: ## remove the virtual environment and all caches
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
