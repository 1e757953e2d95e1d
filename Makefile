# `make demo` and `make test` are all a newcomer needs; both make the virtual environment on first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?= -m "not slow and not gpu and not gpu2"
# The models of the tests and the demo are tiny: more threads than one only get in each other's way.
TEST_THREADS ?= 1
# Processes that share the tests out; whoever has none left takes some from the other.
TEST_WORKERS ?= 2

.PHONY: demo test lint types unit clean

$(BIN)/python:
	@$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info[:2] <= (3, 13), "Python 3.11 to 3.13 is needed"'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/.installed

demo: $(VENV)/.installed
	@echo "A miniature of 8 million parameters, trained on Jane Austen and the King James Bible, continues:"
	OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/quickseek generate --model miniature --prompt "It is a truth universally acknowledged, that" --max-tokens 160 --temperature 0.6 --seed 7 --speculative-tokens 5

test: lint types unit

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

unit: $(VENV)/.installed-dev
	OMP_NUM_THREADS=$(TEST_THREADS) $(BIN)/pytest --numprocesses $(TEST_WORKERS) --dist worksteal $(PYTEST_ARGS)

clean:
	rm -rf $(VENV)
