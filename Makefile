# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKDIR ?= runs/quickstart

.PHONY: demo test test-slow lint types bench check-tpu clean help

help:
	@echo "make demo        install into .venv and train the quickstart (WORKDIR=$(WORKDIR))"
	@echo "make test        install into .venv, then lint, types and all fast tests"
	@echo "make test-slow   the tests marked slow"
	@echo "make bench       scan benchmark on this machine"
	@echo "make check-tpu   compile the TPU kernels ahead of time, in a venv of their own"
	@echo "make clean       remove .venv and caches (never runs/)"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "fpr needs Python 3.11 or newer; this is `$(PYTHON) --version`. Use make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: setup.cfg pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/python -m experiments.run --config=experiments/configs/quickstart.py --workdir=$(WORKDIR)

test: lint types
	$(BIN)/python -m pytest -n 2 -q -m 'not slow'

test-slow: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 -q -m slow

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy fpr kernels_pallas experiments

bench: $(VENV)/.installed
	$(BIN)/python -m experiments.bench scan

clean:
	rm -rf $(VENV) .jax_cache .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

# Compiles every TPU kernel ahead of time for v5e and v6e, without a TPU (libtpu: a large download).
TPU_VENV ?= /tmp/fpr-check-tpu
check-tpu:
	test -d $(TPU_VENV) || $(PYTHON) -m venv $(TPU_VENV)
	$(TPU_VENV)/bin/python -m pip install --quiet -e '.[tpu]'
	JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 $(TPU_VENV)/bin/python -m kernels_pallas.check_tpu
