# `make demo` shows the product on a small real model, `make test` checks it. Both create .venv the first time.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := demo
DEMO_MODEL := $(DEMO)/smollm2-kvconv.gguf
# Compiled kernels that the tests leave for the next run.
KERNELS := KVRUN_CACHE="$(CURDIR)/$(VENV)/kernels"
QUESTION := Explain in two sentences why the sky is blue.

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint format clean

help:
	@echo "make demo       calibrate SmolLM2-135M, chat with it, compare its packed cache with llama.cpp's"
	@echo "make test       lint, types, import rules and tests"
	@echo "make test-slow  the tests that take minutes; KVCONV_TEST_QWEN names a qwen2 model"
	@echo "make lint       ruff, mypy and import-linter alone"
	@echo "make format     let ruff rewrite the files"
	@echo "make clean      remove .venv, demo/ and what the tools left"
	@echo "PYTHON=python3.12 chooses the Python (3.10 to 3.13) that .venv is made of."

# One stamp per extra: what is there already is neither fetched nor compiled again.
$(VENV)/.ready-%: pyproject.toml constraints.txt tools/environment.py
	@"$(PYTHON)" -V >/dev/null 2>&1 || { \
		echo "error: there is no '$(PYTHON)'; install Python 3.10 to 3.13 or name yours: make PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || { \
		echo "error: '$(PYTHON)' is $$("$(PYTHON)" -V 2>&1), but Python 3.10 to 3.13 is needed; name one: make PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" tools/environment.py "$(VENV)" "$*"
	@touch "$@"

demo: $(VENV)/.ready-demo
	@mkdir -p $(DEMO)
	$(BIN)/kvconv calibrate smollm2 -o $(DEMO_MODEL) --force
	$(BIN)/kvrun chat $(DEMO_MODEL) -st --temp 0 -n 96 -p "$(QUESTION)"
	$(BIN)/kvrun compare $(DEMO_MODEL) -c 2048 --chunks 1

test: lint
	$(KERNELS) $(BIN)/python -m pytest

test-slow: $(VENV)/.ready-test
	$(KERNELS) $(BIN)/python -m pytest -m "slow and not gpu"

lint: $(VENV)/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.ready-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(DEMO) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find kvconv runtime kernels tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
