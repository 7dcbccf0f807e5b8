# Every target sets up what it needs: a virtual environment with pinned dependencies, and (for `make test`) the services
# that tests use, from Debian's packages where that is allowed.
SHELL := /bin/bash
VENV  ?= .venv
BIN   := $(VENV)/bin
PYTHON ?= $(shell command -v python3.11 || command -v python3)
STAMP := $(VENV)/.installed
SPEC  ?= examples/llama-stdlib.yaml

.DEFAULT_GOAL := help
.PHONY: help setup services demo up down test soak quick gpu check fix bench dashboards clean

help:            ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 20

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, found {sys.version}"'
	$(PYTHON) -m venv $(VENV)
	PYTHONWARNINGS=ignore $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[worker,plot,dashboards,dev]'
	@touch $@

setup: $(STAMP)  ## virtual environment with pinned dependencies

services:        ## Prometheus, PostgreSQL and Chromium for the tests, from Debian's packages where that is allowed
	@scripts/services

demo: setup      ## train the example end to end through the service and print what ran
	@$(BIN)/dmuonctl demo $(SPEC)

up: setup        ## run the service until Ctrl-C
	@$(BIN)/dmuonctl up

down: setup      ## end what `make up` left running
	@$(BIN)/dmuonctl down

test: setup services  ## everything that a machine without a GPU can show (under 15 minutes)
	$(MAKE) --no-print-directory check
	@scripts/test $(BIN)/python

soak: setup      ## inject faults into a running service for about half an hour; FAULTS="--kills 5 --rounds 1" for less
	$(BIN)/python -m tests.e2e.faults $(FAULTS)

quick: setup     ## the fast part of the tests (under 2 minutes)
	$(BIN)/python -m pytest -n 2 -m 'not multiproc and not service'

gpu: setup       ## what needs GPUs: laws on NCCL, kernels, whole steps, the service; PARTS="tests kernels" for some of it
	@scripts/gpu $(BIN)/python $(PARTS)

check: setup     ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m dashboards --check

fix: setup       ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

dashboards: setup  ## write the generated dashboards anew
	$(BIN)/python -m dashboards

bench: setup     ## benchmarks that a CPU can run; each writes a JSON under benchmarks/results
	$(BIN)/python -m benchmarks

clean:           ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache *.egg-info
