# Two commands: `make demo` and `make test`. Both set up .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
comma := ,
NATIVE := $(shell find plugins -name '*.cc' -o -name '*.h' -o -name CMakeLists.txt)

.PHONY: demo test test-native bench bench-model bench-quick lint format clean

demo: $(VENV)/installed
	$(BIN)/aftexport demo

test: lint
	$(BIN)/pytest

# The kernels' own C++ tests: as they ship, and under each sanitizer.
test-native: $(VENV)/installed $(foreach kind,plain address+undefined thread,native-$(kind))

native-%: $(VENV)/installed
	$(BIN)/cmake -S plugins -B build/native/$* -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -DAFT_TESTS=ON -DAFT_SANITIZE=$(subst +,$(comma),$(filter-out plain,$*))
	$(BIN)/cmake --build build/native/$* --parallel 2 --target native_tests encoder_tests
	$(BIN)/ctest --test-dir build/native/$* --output-on-failure

bench: $(VENV)/installed
	PYTHONPATH=tests $(BIN)/python -m benchmarks

bench-model: $(VENV)/installed
	PYTHONPATH=tests $(BIN)/python -m benchmarks --model

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
