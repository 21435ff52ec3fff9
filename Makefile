# make demo   a real vLLM is killed, starts again, and finds its KV cache on disk (about two minutes once set up)
# make test   all tests
# make lint   ruff, mypy, import contracts
# make docs   the documentation, into site/
# make setup  the virtual environment that all of these need; each of them makes it first, and it is not made twice
VENV ?= .venv
export VENV
PY := $(VENV)/bin/python
# Heavy tests (engines, torture) run one after another, all others two at a time. Both parts run, whatever the first says.
PYTEST_EXTRA ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint docs
.SILENT:

help:
	sed -n 's/^# make /make /p' Makefile

setup:
	scripts/setup_env.sh

demo: setup
	$(PY) examples/vllm_restart.py --json out.json

test: setup
	failed=0; \
	$(PY) -m pytest -q -n 2 -m "not heavy" $(PYTEST_EXTRA) || failed=1; \
	$(PY) -m pytest -q -m heavy $(PYTEST_EXTRA) || failed=1; \
	exit $$failed

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --strict kvstore
	$(VENV)/bin/lint-imports --no-logo --no-cache

docs: setup
	$(PY) -m mkdocs build --strict --quiet
