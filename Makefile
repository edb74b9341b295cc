# Two commands do everything on a fresh machine: `make chat` and `make test`.

PYTHON ?= python3
MODEL ?=
WORKERS ?= 2

INSTALL = .venv/bin/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable

.DEFAULT_GOAL := help
.PHONY: help chat test lint format clean

help:  ## list these commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' Makefile
	@echo
	@echo "PYTHON=python3.12 chooses another interpreter, MODEL=folder another model for chat."

chat: .venv/runtime  ## talk to the embedded model, or to MODEL=folder
	@.venv/bin/deltafin chat $(if $(MODEL),"$(MODEL)")

test: lint  ## every check: format, lint, imports, types, tests
	@OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n $(WORKERS)

lint: .venv/dev  ## the quick checks alone
	@.venv/bin/python -m ruff check .
	@.venv/bin/python -m ruff format --check .
	@.venv/bin/lint-imports --no-logo
	@.venv/bin/python -m pyright --pythonpath .venv/bin/python

format: .venv/dev  ## rewrite the code as `make lint` wants it
	@.venv/bin/python -m ruff check --fix .
	@.venv/bin/python -m ruff format .

clean:  ## remove the virtual environment, builds and caches
	@rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are written last: an installation that was cut off is done again.
.venv/runtime: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; choose one with PYTHON=..." if sys.version_info < (3, 11) else 0)'
	@echo "Installing deltafin and what it needs into .venv; this takes a few minutes, once."
	@$(PYTHON) -m venv .venv
	@$(INSTALL) .
	@touch $@

.venv/dev: .venv/runtime
	@echo "Installing the development tools into .venv, once."
	@$(INSTALL) ".[dev]"
	@touch $@
