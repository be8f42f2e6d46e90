# `make` sets up .venv and runs the main job; `make test` sets it up and runs all checks. Nothing else is needed.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
export PYTHONPATH := $(CURDIR)
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export MLFLOW_DISABLE_TELEMETRY := true
export DO_NOT_TRACK := 1

.PHONY: main paper report ui worker test test-slow lint format select calibrate apart coverage bench bench-memory bench-learning cluster check setup clean
.DEFAULT_GOAL := main

main: .venv/ready
	$(BIN)/python -m flows.pipeline --study gridworld-1000

paper: .venv/ready
	$(BIN)/python -m flows.pipeline --all

test: lint .venv/browser
	$(BIN)/python -m pytest --numprocesses 2 --no-loadscope-reorder

test-slow: .venv/ready
	HYPOTHESIS_PROFILE=slow $(BIN)/python -m pytest -m "slow or not slow"

lint: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/ready
	$(PIP) --editable '.[bench]'
	$(PIP) --no-deps d3rlpy
	$(BIN)/python -m benchmarks

bench-memory: .venv/ready
	$(BIN)/python -m benchmarks.fqe_memory

bench-learning: .venv/ready
	$(PIP) --editable '.[bench]'
	$(BIN)/python -m benchmarks.ppo_learning

report: .venv/ready
	$(BIN)/python -m tasks.report --all

ui: .venv/ready
	$(BIN)/python -m flows.ui

worker: .venv/ready
	$(BIN)/python -m flows.worker

select: .venv/ready
	$(BIN)/python -m tasks.select

calibrate: .venv/ready
	$(BIN)/python -m tasks.calibrate

apart: .venv/ready
	$(BIN)/python -m tasks.apart

coverage: .venv/ready
	$(BIN)/python -m tasks.coverage

.PHONY: docs  # which is a folder as well
docs: .venv/ready
	$(BIN)/mkdocs build --strict --quiet
	@echo "docs: open site/index.html"

cluster: .venv/ready
	$(BIN)/python -m flows.cluster

check: .venv/ready
	$(BIN)/python -m flows.check --study gridworld-1000 --group 0

setup: .venv/ready

clean:
	rm -rf .venv site .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info

# Pages are opened in a real browser by their tests, which skip where there is none (and fail where CI is true).
.venv/browser: .venv/ready
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && touch $@ && exit; done; \
	echo "make: installing Chromium, which the tests of pages use"; \
	[ "$$(id -u)" = 0 ] || as="sudo -n"; \
	{ $$as apt-get update && $$as apt-get install --yes --no-install-recommends chromium; } >$@.log 2>&1 </dev/null \
	&& touch $@ || echo "make: Chromium could not be installed ($@.log): tests that need it will be skipped"

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v == (3, 11) or sys.exit(f"make: expected Python 3.11, found {v[0]}.{v[1]}; run make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(PIP) --editable '.[dev]'
	touch $@
