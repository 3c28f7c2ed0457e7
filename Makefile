# Everything happens inside .venv; nothing outside the checkout is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core-installed
DEV := $(VENV)/.dev-installed
PIP := $(BIN)/pip --disable-pip-version-check --quiet install --constraint constraints.txt

export OMP_NUM_THREADS = 1
# Where it is set every worker and every child process would compile all modules anew.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help demo test fast soak bench peers compat sbom lint types format clean

help:  ## What can be made
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */\t/' | expand -t 10

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(CORE): pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable .
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[dev]'
	@touch $@ $(CORE)

demo: $(CORE)  ## A 4-rank runtime goes wrong as one did in production, and the verdict
	$(BIN)/hicache demo

test: $(DEV)  ## The whole test suite
	$(BIN)/python -m pytest -n 2 --dist loadgroup

fast: $(DEV)  ## The tests that need no long run, under 30 seconds
	$(BIN)/python -m pytest -m "not slow"

soak: $(DEV)  ## The suite's claims over many more seeds; the result is kept in docs/soak.md
	$(BIN)/python -m tests.soak > docs/soak.md.new && mv docs/soak.md.new docs/soak.md

bench: $(DEV)  ## Speed of the tree and of a production trace; see benchmarks/README.md
	$(BIN)/python -m benchmarks

peers: $(DEV)  ## A real SGLang: healthy runs and faults; HICACHE_PEERS and HICACHE_RIG say where it is
	$(BIN)/python -m tests.peers.matrix
	$(BIN)/python -m tests.peers.cases

compat: $(DEV)  ## Which functions the published versions of SGLang have; downloads their wheels once
	$(BIN)/python -m tests.peers.compat

sbom: $(DEV)  ## Lock file with hashes and bill of materials, made anew from a package index
	$(BIN)/python -m tests.supply_chain

lint: $(DEV)  ## Style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)  ## Types
	$(BIN)/mypy

format: $(DEV)  ## Rewrite the sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the environment and all that was built
	rm -rf $(VENV) runs build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
