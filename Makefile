# make demo | test | check | matrix | bench, on a fresh clone with nothing but python3.
#
# torch is installed first and by itself: TORCH names the build to use, from any index pip is set up for. The default is
# the version development happens on, e.g. `make test TORCH=torch==2.11.0`.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin

ASCEND_ENVIRONMENT ?= .venv-ascend
ASCEND_PYTHON ?= $(shell command -v python3.11 || echo $(PYTHON))

.PHONY: help demo test test-ascend check lint types pytest matrix bench bench-gpu charts docs release-check doctor clean

help:
	@echo "make demo    install, then run a hand-written KDA layer under backend=\"kda\" (examples/own_model.py)"
	@echo "make test    install with the test extras, then lint, types and tests"
	@echo "make test-ascend   the Ascend kernels through the real compiler, and its output executed on this CPU"
	@echo "make check   lint and types only"
	@echo "make matrix  every model, every length, as a table"
	@echo "make bench   ours beside Inductor alone and eager, on this CPU"
	@echo "make bench-gpu  forward and training of KDA on this GPU, ours beside FLA, Inductor and eager: figures, chart"
	@echo "make docs    the documentation as a site, in site/"
	@echo "make charts  the charts and the screenshot of the README, from docs/results/"
	@echo "make release-check   build the wheel and install it into clean environments"
	@echo "make doctor  what this machine can run, and why not the rest"

# Stamps make installation happen once, and again when what is to be installed changes. The torch version is part of the
# name, so that another TORCH= is another stamp.
TORCH_STAMP := $(VENV)/.torch-$(subst /,_,$(subst =,_,$(TORCH)))
BASE_STAMP := $(VENV)/.base
TEST_STAMP := $(VENV)/.test
DOCS_STAMP := $(VENV)/.docs

# torch before 2.14 names its folder to the linker without quotes.
ifneq ($(and $(word 2,$(CURDIR)),$(filter-out /%,$(firstword $(VENV))),$(filter torch==2.11% torch==2.12% torch==2.13%,$(TORCH))),)
UNQUOTED := yes
endif

$(BIN)/python:
	$(if $(UNQUOTED),@echo "$(TORCH) cannot link in a folder with a space in its name: make $(MAKECMDGOALS) VENV=<a folder>" >&2; exit 1)
	$(PYTHON) -m venv $(VENV) || { echo "to install elsewhere: make $(MAKECMDGOALS) VENV=<a folder>" >&2; exit 1; }

# A checkout that cannot be written is installed from a copy: setuptools writes beside what it installs.
ifeq ($(shell test -w . && echo yes),yes)
SOURCE := .
else
SOURCE := $(VENV)/source
endif

$(VENV)/source: pyproject.toml | $(BIN)/python
	mkdir -p $@
	cp -r kdacompile patterns lowering README.md LICENSE pyproject.toml $@
	chmod -R u+w $@
	@touch $@

$(TORCH_STAMP): | $(BIN)/python
	$(BIN)/python -m pip install "$(TORCH)"
	@rm -f $(VENV)/.torch-*
	@touch $@

$(BASE_STAMP): pyproject.toml $(TORCH_STAMP) | $(SOURCE)
	$(BIN)/python -m pip install -e $(SOURCE)
	@touch $@

$(TEST_STAMP): pyproject.toml $(TORCH_STAMP)
	$(BIN)/python -m pip install -e ".[test,models,dev]"
	@touch $@ $(BASE_STAMP)

$(DOCS_STAMP): pyproject.toml $(TORCH_STAMP)
	$(BIN)/python -m pip install -e ".[docs,plot,cli,release]"
	@touch $@ $(BASE_STAMP)

demo: $(BASE_STAMP)
	$(BIN)/python examples/own_model.py

lint: $(TEST_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TEST_STAMP)
	$(BIN)/pyright --pythonpath $(BIN)/python

pytest: $(TEST_STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

check: lint types

# One process checks the types; the first tests run beside it.
test: lint
	$(MAKE) --no-print-directory -j 2 types pytest

# The compiler's wheels exist for some platforms and for Python 3.11; elsewhere the tests are skipped and say why.
# ASCEND_CASES=--one-case runs each test with its first parameters alone.
test-ascend: $(TEST_STAMP)
	$(BIN)/python -m tests.ascend.environment $(ASCEND_ENVIRONMENT) $(ASCEND_PYTHON)
	KDA_ASCEND_ENVIRONMENT=$(ASCEND_ENVIRONMENT) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal tests/ascend $(ASCEND_CASES)

matrix: $(TEST_STAMP)
	$(BIN)/python -m tests.matrix

bench: $(TEST_STAMP)
	$(BIN)/python -m kdacompile bench --suite cpu

# The figures of the README's chart, in one run.
bench-gpu: $(TEST_STAMP)
	$(BIN)/python -m pip install -e ".[fla]"
	$(BIN)/python -m kdacompile bench --suite train --case kda --json docs/results/h200-kda.json
	$(MAKE) --no-print-directory charts

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

charts: $(DOCS_STAMP)
	$(BIN)/python -m kdacompile.bench.charts docs/results/*.json --out docs/charts --page docs/results.md
	cd examples && ../$(BIN)/kdacompile explain quickstart.py:made --no-time --svg ../docs/charts/explain.svg

release-check: $(DOCS_STAMP)
	$(BIN)/python -m tests.release

doctor: $(BASE_STAMP)
	$(BIN)/python -m kdacompile doctor

clean:
	rm -rf $(VENV) $(ASCEND_ENVIRONMENT) build dist site *.egg-info .pytest_cache .ruff_cache
