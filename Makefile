# make demo   a real vLLM is killed, starts again, and finds its KV cache on disk (about two minutes once set up)
# make test   all tests
# make lint   ruff, mypy, import contracts
# make docs   the documentation, into site/
# make setup  the virtual environment that all of these need; each of them makes it first, and it is not made twice
VENV ?= .venv
export VENV
PY := $(VENV)/bin/python
# Two workers: heavy tests (vllm, torture) share one of them and so run one after another.
PYTEST_FLAGS ?= -n 2 --dist loadgroup -q
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
	$(PY) -m pytest $(PYTEST_FLAGS) $(PYTEST_EXTRA)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --strict kvstore
	$(VENV)/bin/lint-imports --no-logo --no-cache

docs: setup
	$(PY) -m mkdocs build --strict --quiet
