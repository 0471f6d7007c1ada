# `make demo` and `make test` do everything on a fresh machine with Python 3.10 or newer.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SOURCES := megaconv loaders savers formats megatron_lite

.PHONY: demo demo-train test test-slow test-gpu check benchmark clean

demo: $(VENV)/.installed
	$(BIN)/megaconv demo

demo-train: $(VENV)/.tested
	PYTHON=$(BIN)/python examples/finetune.sh

test: $(VENV)/.tested check
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu"

test-slow: $(VENV)/.tested
	$(BIN)/python -m pytest -n 2 -m slow

test-gpu: $(VENV)/.tested
	$(BIN)/python -m pytest -m gpu

check: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/mypy

benchmark: $(VENV)/.tested
	$(BIN)/python benchmarks/convert.py
	$(BIN)/python benchmarks/trainer.py single
	$(BIN)/python benchmarks/trainer.py parallel

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(PIP) -e ".[test,oracle,data,train,zarr]"
	touch $@

clean:
	rm -rf $(VENV)
