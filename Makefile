# Every target works alone on a fresh clone: it builds .venv first.
# Owns: how the checks are run. Does not own: their settings (pyproject.toml).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := tiered_mmcache tools tests

.DEFAULT_GOAL := help
.PHONY: help demo test test-faults test-sglang test-prometheus dashboard-image test-gpu coverage check bench bench-gpu bench-peers format format-check lint types imports docs clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' \
		| awk -F '\t' '{printf "make %-13s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo,bench,prometheus,plot,dev]'
	@touch $@

demo: $(STAMP)  ## Run the main job on real images: hot, host and disk instead of the encoder
	$(BIN)/mmcache demo

test: $(STAMP)  ## Run the tests that need no GPU
	$(BIN)/python -m pytest

test-faults: $(STAMP)  ## Damage, kills, full disks and more by the hundred, about twenty minutes; FAULTS=--help
	PYTHONPATH=tests/faults $(BIN)/python -m campaign $(FAULTS)

test-sglang: $(STAMP)  ## Run the plug-in inside the published releases of SGLang; downloads them once
	$(BIN)/python tests/engines/releases.py
	$(BIN)/python -m pytest -m sglang tests/engines

test-prometheus: $(STAMP)  ## Ask the dashboard's queries of a real Prometheus; fetches Debian's once
	$(BIN)/python -m mmcache_tools.monitoring.prometheus_server
	$(BIN)/python -m pytest -m prometheus tests/monitoring

dashboard-image: $(STAMP)  ## Draw the dashboard over a played server, into docs
	$(BIN)/python -m mmcache_tools.monitoring.picture docs/monitoring/dashboard.png

test-gpu: $(STAMP)  ## Run the GPU tests; fails where there is no GPU
	@$(BIN)/python -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else \
		"make test-gpu: torch sees no CUDA device here, so the GPU tests cannot run.")'
	$(BIN)/python -m pytest -m gpu tests/gpu

# What the plug-in does can only be run inside SGLang, so this runs the tests of test-sglang, too,
# and those of test-prometheus.
coverage: $(STAMP)  ## Run the tests, fail below the branch coverage that pyproject.toml asks for
	@rm -f .coverage .coverage.*
	$(BIN)/python tests/engines/releases.py
	$(BIN)/python -m mmcache_tools.monitoring.prometheus_server
	$(BIN)/python -m pytest -m 'not gpu' --cov --cov-report=term --cov-report=html

check: format-check lint types imports docs coverage  ## Everything that must be green before a commit

bench: $(STAMP)  ## Measure, and print the ratios and their bounds
	$(BIN)/mmcache bench

bench-gpu: $(STAMP)  ## Measure moves on a GPU beside the page-locked copy limit; fails where there is none
	$(BIN)/mmcache bench --gpu

# PEERS names the traces: --servegen FOLDER --popularity FILE --conversations FILE.
bench-peers: $(STAMP)  ## Measure beside what a user would pick instead, and write docs/peers.md
	$(BIN)/mmcache compare --page docs/peers.md $(PEERS)

format: $(STAMP)  ## Rewrite the sources in the project's format
	$(BIN)/ruff check --select I --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

format-check: $(STAMP)  ## Fail when `make format` would change something
	$(BIN)/ruff format --check $(SOURCES)

lint: $(STAMP)  ## Lint
	$(BIN)/ruff check $(SOURCES)

types: $(STAMP)  ## Check the types
	$(BIN)/mypy

imports: $(STAMP)  ## Check who may import whom
	$(BIN)/lint-imports

docs: $(STAMP)  ## Run the examples of README.md and docs/, check their links
	$(BIN)/python -m pytest tests/docs

clean:  ## Remove .venv, caches, build outputs and the demo's store
	rm -rf $(VENV) build dist mmcache-demo .mypy_cache .pytest_cache .ruff_cache .hypothesis \
		.import_linter_cache .coverage .coverage.* coverage.xml
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
