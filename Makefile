# `make demo` and `make test` work on a fresh machine with Python, pip and make: each sets .venv up first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_DIR ?= demo
ENGINES_DIR ?= compiled

.PHONY: venv demo engines test lint clean

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v <= (3, 12) else f"turbovit needs Python 3.10 to 3.12, found {v[0]}.{v[1]}: run make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade pip
	$(BIN)/python -m pip install --editable '.[dev]'
	touch $@

demo: venv
	$(BIN)/python -m turbovit.benchmarks.demo $(DEMO_DIR)

# No GPU is needed; about 15 GB of disk, and five minutes on two cores.
engines: venv
	$(BIN)/python -m turbovit.benchmarks.engines $(ENGINES_DIR)

test: venv
	$(BIN)/python -m pytest

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(DEMO_DIR) $(ENGINES_DIR) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
