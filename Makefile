# One command each, for people and CI alike. Every target sets up what it needs in .venv.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CLIENTS := .venv-clients/.installed
NODE_CLIENTS := tests/clients/node/node_modules/.installed
LOAD := .venv-load/.installed
ENGINE := .venv-engine/.installed

.PHONY: run test lint check bench chaos conformance clients engine fmt clean

run: $(STAMP)                ## embedded Valkey + 3 fake nodes + 3 replicas on loopback
	$(BIN)/leaseway up

test: $(STAMP) clients engine  ## the whole suite; the closing line is pytest's
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

conformance: $(STAMP) clients  ## writes docs/conformance.md
	$(BIN)/python -m tests.clients.conformance

clients: $(CLIENTS) $(NODE_CLIENTS) $(LOAD)  ## real clients, for the tests, each in its own place
engine: $(ENGINE)            ## a real llama.cpp server, built small from source, for the tests

fmt: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .venv-clients .venv-load .venv-engine tests/clients/node/node_modules \
		.mypy_cache .pytest_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# What follows is for tests alone and may not be to be had everywhere (a leading "-" goes on without
# it): the tests that want it then skip, and say which target to run and read.
$(CLIENTS): tests/clients/requirements.txt
	-$(PYTHON) -m venv .venv-clients && .venv-clients/bin/python -m pip install --quiet \
		--disable-pip-version-check -r $< && touch $@

$(LOAD): tests/clients/requirements-load.txt
	-$(PYTHON) -m venv .venv-load && .venv-load/bin/python -m pip install --quiet \
		--disable-pip-version-check -r $< && touch $@

$(NODE_CLIENTS): tests/clients/node/package-lock.json
	-cd tests/clients/node && npm ci --ignore-scripts --no-audit --no-fund && touch node_modules/.installed

$(ENGINE): tests/engine/requirements.txt tests/engine/lean.cmake
	-$(PYTHON) -m venv .venv-engine && \
		CMAKE_ARGS="-DCMAKE_PROJECT_llama_cpp_INCLUDE=$(CURDIR)/tests/engine/lean.cmake" \
		.venv-engine/bin/python -m pip install --quiet --disable-pip-version-check -r $< && touch $@
