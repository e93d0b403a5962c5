# Two commands: `make demo` and `make test`. Both set up .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(shell find plugins -name '*.cc' -o -name '*.h' -o -name CMakeLists.txt)

.PHONY: demo test bench bench-quick lint format clean

demo: $(VENV)/installed
	$(BIN)/aftexport demo

test: lint
	$(BIN)/pytest

bench: $(VENV)/installed
	PYTHONPATH=tests $(BIN)/python -m benchmarks

bench-quick: $(VENV)/installed
	PYTHONPATH=tests $(BIN)/python -m benchmarks --quick

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build

$(VENV)/installed: pyproject.toml constraints.txt $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "aftexport needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11"; exit 1; }
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --constraint constraints.txt --editable '.[dev]'
	touch $@
