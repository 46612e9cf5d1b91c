# `make demo` and `make test` work on a fresh machine with Python, pip and make: each sets .venv up first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_DIR ?= demo
ENGINES_DIR ?= compiled
BENCH_DIR ?= docs/bench

.PHONY: venv demo engines test bench lint clean

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

# The README's figures. About three quarters of an hour on two cores that do nothing else, and 9 GB in the store.
bench: venv
	$(BIN)/python -m turbovit bench encoder --batch 1,2 --output $(BENCH_DIR)
	$(BIN)/python -m turbovit bench encoder --family qwen3_vl --image 256x256,512x512,1024x1024,2048x2048 --rounds 3 \
		--contender eager,turbovit --output $(BENCH_DIR)/growth
	$(BIN)/python -m turbovit bench preprocess --output $(BENCH_DIR)
	$(BIN)/python -m turbovit bench glue --output $(BENCH_DIR)
	$(BIN)/python -m turbovit bench serve --output $(BENCH_DIR)
	$(BIN)/python -m turbovit bench build --family gemma3 --layers 0 --runtime onnxruntime,tensorrt-rtx \
		--compute-capability 8.6,8.9,12.0 --output $(BENCH_DIR)
	$(BIN)/python -m turbovit bench build --family qwen3_vl --image 256x256,512x512,1024x1024,2048x2048 \
		--output $(BENCH_DIR)/growth
	$(BIN)/python -m turbovit.benchmarks.readme README.md $(BENCH_DIR)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(DEMO_DIR) $(ENGINES_DIR) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
