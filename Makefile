# `make demo` and `make test` work on a fresh machine: they make .venv and install what they need.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip --disable-pip-version-check -qq

# Small machines: spinning OpenMP threads slow each other down several times.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: help dev lint type test test-unit test-slow test-engines demo bench clean

help:
	@echo "make demo       a real model gets a draft head, from prompts to the acceptance table"
	@echo "make test       lint, types, unit tests, then the slow tests (what CI runs)"
	@echo "make test-unit  unit tests only"
	@echo "make test-engines  real vLLM and SGLang serve our heads (two environments, 6 GB, cached)"
	@echo "make lint type  ruff, codespell, file checks; mypy"
	@echo "make bench      cost of the training step; PEERS=path/to/harness.py compares, ARGS=--quick is short"
	@echo "make dev        the environment of all these, in $(VENV)"
	@echo "make clean      removes $(VENV) and the caches, keeps runs/"

# --- environment -----------------------------------------------------------------------------

$(PYTHON):
	@for python in python3.11 python3.12 python3.13 python3; do \
		if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			echo "making $(VENV) with $$($$python --version)"; \
			$$python -m venv $(VENV); exit; \
		fi; \
	done; \
	echo "error: Python 3.11 or newer is needed and none was found on PATH" >&2; exit 1

# torch first and alone: its pinned version decides which build every later step sees.
$(VENV)/.runtime: pyproject.toml constraints.txt | $(PYTHON)
	@echo "installing the dependencies (some minutes the first time)"
	@$(PIP) install "$$(grep '^torch==' constraints.txt)"
	@$(PIP) install -c constraints.txt -e .
	@mkdir -p .ns && ln -sfn .. .ns/slipstream
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "installing the development tools"
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

dev: $(VENV)/.dev

clean:
	rm -rf $(VENV) .ns build *.egg-info .mypy_cache .pytest_cache .ruff_cache

# --- checks ----------------------------------------------------------------------------------

lint: dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/codespell
	$(PYTHON) -m pytest -q tests/test_tree.py tests/test_layering.py

type: dev
	$(VENV)/bin/mypy

test-unit: dev
	$(PYTHON) -m pytest -m "not slow and not engine"

test-slow: dev
	$(PYTHON) -m pytest -m slow

# The engines live in environments of their own, in ~/.cache/slipstream/engines or SLIPSTREAM_CACHE.
test-engines: dev
	$(PYTHON) -m pytest -m engine tests/engines

test: dev
	$(MAKE) --no-print-directory lint
	$(MAKE) --no-print-directory type
	$(MAKE) --no-print-directory test-unit
	$(MAKE) --no-print-directory test-slow

# --- the show --------------------------------------------------------------------------------

demo: $(VENV)/.runtime
	$(PYTHON) scripts/pipeline.py recipe=demo

bench: $(VENV)/.runtime
	$(PYTHON) scripts/bench.py --peers "$(PEERS)" $(ARGS)
