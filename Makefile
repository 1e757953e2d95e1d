# `make demo` and `make test` are all a newcomer needs; both make the virtual environment on first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?= -m "not slow and not gpu and not gpu2"

.PHONY: install demo test lint types unit clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info[:2] <= (3, 13), f"Python 3.11 to 3.13 is needed, this is {sys.version.split()[0]}"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: install
	@test -e demo/tiny/config.json || $(BIN)/quickseek tiny demo/tiny
	@echo "The miniature's weights are random: what follows shows the machinery, not sense."
	$(BIN)/quickseek generate --model demo/tiny --chat "How fast can a token be?" --max-tokens 64 --seed 7 --ignore-eos

test: lint types unit

lint: install
	$(BIN)/ruff check .

types: install
	$(BIN)/mypy

unit: install
	$(BIN)/pytest $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) demo
