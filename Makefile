# Every target works from a fresh clone: it makes .venv first. `make help` lists them.
#
#   PYTHON      the interpreter that .venv is made from (3.11 or newer)
#   TORCH       which torch to install, e.g. TORCH='torch==2.12.*'
#   PIP_ARGS    more arguments for pip, e.g. the index of torch's CPU builds, which spares gigabytes of CUDA on Linux:
#               make demo PIP_ARGS='--extra-index-url https://download.pytorch.org/whl/cpu'
#   ARGS        more arguments for a target's program, e.g. make test ARGS='tests/core -k fork'
#   VENV        the virtual environment, e.g. make test PYTHON=python3.13 VENV=.venv-3.13

PYTHON   ?= python3
TORCH    ?= torch>=2.11,<2.14
PIP_ARGS ?=
ARGS     ?=

VENV    ?= .venv
BIN     := $(VENV)/bin
RUNTIME := $(VENV)/.installed
DEV     := $(VENV)/.installed-dev
# Two workers on two cores, with one thread each: torch's own threads would only fight over the tiny tensors of tests.
PYTEST  := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
WORKERS ?= 2
# A worker that is done takes tests of the other: some take minutes.
SPREAD  := -n $(WORKERS) --dist worksteal
TARGET  ?= quick
QUICK   := tests/params tests/core tests/text tests/test_project.py

.DEFAULT_GOAL := help
.PHONY: help demo quick test proof pythons test-gpu sanitize clients fuzz dashboard check docs blas prove reliability mutants bench lint types contracts size coverage clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(RUNTIME) ## a real model answers eight prompts together, from paged memory
	@$(BIN)/octavo demo $(ARGS)

quick: $(DEV) ## the inner loop, under a minute: lint, and the tests of the core, parameters, text and this project's rules
	@$(BIN)/ruff check && $(BIN)/ruff format --check
	@$(PYTEST) $(SPREAD) -m 'not slow and not proof' $(QUICK) $(ARGS)

test: $(DEV) ## the tests, in 15 to 30 minutes on two cores; the end lists skipped tests with their reasons
	@echo '== test'
	@$(PYTEST) $(SPREAD) -m 'not slow and not proof' -rs $(ARGS)

proof: $(DEV) ## the longer tests that `make check` adds: kernels in Triton's interpreter, fairness, real models
	@echo '== longer tests'
	@$(PYTEST) $(SPREAD) -m 'proof and not slow' -rs $(ARGS)

pythons: ## `make quick`, or TARGET=test, on every other Python at hand that torch has wheels for
	@for version in 3.11 3.12 3.13 3.14; do \
		python=$$(command -v python$$version) && "$$python" -c 'import venv, ensurepip' 2>/dev/null || continue; \
		echo "== python$$version"; \
		$(MAKE) --no-print-directory $(TARGET) PYTHON="$$python" VENV=.venv-$$version || exit 1; \
	done

test-gpu: $(DEV) ## on a machine with an NVIDIA GPU: its kernels, and the engine's tokens against the CPU's
	@$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("make test-gpu: no NVIDIA GPU here")'
	@$(PYTEST) tests/gpu $(ARGS)

sanitize: $(DEV) ## on a machine with an NVIDIA GPU: its kernels' tests under compute-sanitizer
	@$(BIN)/python scripts/sanitize.py $(ARGS)

clients fuzz reliability: export PIP_ARGS := $(PIP_ARGS)

clients: $(DEV) ## other people's clients of the server, each in its own venv; with ARGS='peers ...', other engines' tests
	@$(BIN)/python scripts/clients.py $(ARGS)

fuzz: $(DEV) ## bodies made up from the OpenAPI document, right and wrong, a thousand of each route
	@OCTAVO_FUZZ_EXAMPLES=1000 $(BIN)/python scripts/clients.py schemathesis $(ARGS)

dashboard: $(DEV) ## the Grafana dashboard against a real Prometheus, and its picture
	@$(BIN)/python scripts/grafana_check.py $(ARGS)

check: test proof docs coverage lint types contracts size ## what a change must pass: tests, documentation, coverage, lint, types, imports, sizes
	@echo '== all checks passed'

docs: $(DEV) ## the pages of docs/ as a site in site/, without a network; a warning is an error
	@echo '== docs'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

prove: $(DEV) ## the long proofs: 10^6 steps under the oracle, small worlds exhaustively, the full matrix
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.proof.prove $(ARGS)

reliability: $(DEV) ## faults by the hundred, overload, hostile clients (half an hour): nothing lost, hung, wrong or leaked
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.proof.reliability $(ARGS)

mutants: $(DEV) ## plant every known bug in the core, one at a time, and see the tests kill it
	@$(BIN)/python scripts/mutants.py $(ARGS)

bench: $(DEV) ## the core's cost, the attention ladder, and this CPU beside Transformers and llama.cpp (half an hour)
	@$(BIN)/octavo bench core
	@$(BIN)/python benchmarks/attention.py
	@$(BIN)/python benchmarks/cpu_compare.py $(ARGS)

# numpy's products are OpenBLAS's, which rounds differently on each processor, and Triton's interpreter uses them.
blas: $(DEV) ## the tests that multiply with numpy, as OpenBLAS rounds on Haswell and Zen
	@echo '== tests of products, as OpenBLAS computes them on Haswell'
	@OPENBLAS_CORETYPE=Haswell $(PYTEST) $(SPREAD) -q tests/kernels/triton/test_interpreter.py $(ARGS)

# Snapshots are tested with the recorder that takes them, beam search parameters with beam search.
coverage: COVERED_BY := tests/core tests/params tests/view/recording tests/engine/test_beam_search.py
coverage: $(DEV)
	@echo '== coverage: every branch of octavo.core and octavo.params'
	@$(PYTEST) $(SPREAD) -m 'not slow' $(COVERED_BY) --cov --cov-report=term:skip-covered --cov-fail-under=100

lint: $(DEV)
	@echo '== lint'
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@if [ -x $(BIN)/hadolint ]; then $(BIN)/hadolint deploy/Dockerfile; else echo 'deploy/Dockerfile not linted: no hadolint here'; fi

types: $(DEV)
	@echo '== types'
	@$(BIN)/mypy

contracts: $(DEV)
	@echo '== import contracts'
	@$(BIN)/lint-imports --no-logo

size: $(DEV)
	@echo '== size'
	@$(BIN)/python scripts/size.py

clean: ## remove .venv and what the tools left behind
	rm -rf .venv .venv-3.* .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage* build dist site
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are older than pyproject.toml after a change to it, and only then is anything installed again.
# pip is quiet for minutes, so the first line says what it does.
INSTALLING := installing Octavo and torch into $(VENV); the first time takes minutes

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(RUNTIME): pyproject.toml | $(BIN)/python
	@echo '$(INSTALLING)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) '$(TORCH)' -e .
	@touch $@

$(DEV): pyproject.toml | $(BIN)/python
	@echo '$(INSTALLING)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) '$(TORCH)' -e '.[dev]'
	@touch $(RUNTIME) $@
