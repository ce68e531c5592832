# One command each, for people and CI alike. Every target sets up what it needs in .venv.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run test lint check bench chaos fmt clean

run: $(STAMP)                ## embedded Valkey + 3 fake nodes + 3 replicas on loopback
	$(BIN)/leaseway up

test: $(STAMP)               ## the whole suite; the closing line is pytest's
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)               ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test             ## the gate, for people and CI alike

bench: $(STAMP)              ## gateway CPU-µs per request beside nginx, interleaved
	$(BIN)/leaseway bench gateway $(ARGS)

chaos: $(STAMP)              ## faults at random under load; CHAOS_SECONDS (600), CHAOS_SEED (1)
	$(BIN)/python -m tests.chaos.run $(ARGS)

fmt: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
