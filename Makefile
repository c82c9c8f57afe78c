# The whole set-up: `make demo` or `make test` on a machine with Python 3.11+ and make.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test unit check protos identity bench loadtest clean

demo: $(READY)
	$(BIN)/tandem models pull smollm2-135m
	$(BIN)/python scripts/demo.py

test: $(READY)
	$(BIN)/tandem models pull smollm2-135m
	TANDEM_REQUIRE_MODEL=1 $(BIN)/python -m pytest

# No model files, under a minute.
unit: $(READY)
	$(BIN)/python -m pytest -m "not model"

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

protos: $(READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/generate_stubs.py

# The identity tests in full; writes docs/reports/identity.md.
identity: $(READY)
	$(BIN)/tandem models pull smollm2-135m
	$(BIN)/python scripts/identity.py --out docs/reports/identity.md

# Engine against a bare forward; writes docs/reports/engine-*.md.
bench: $(READY)
	$(BIN)/tandem models pull smollm2-135m
	$(BIN)/tandem bench engine --dtype float32 --out docs/reports/engine-float32.md
	$(BIN)/tandem bench engine --dtype bfloat16 --out docs/reports/engine-bfloat16.md

# Locust for 20 seconds against `tandem up`.
loadtest: $(READY)
	$(BIN)/tandem models pull smollm2-135m
	$(BIN)/python -m loadtest --seconds 20 --users 4

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[engine,load,dev]"
	touch $@
