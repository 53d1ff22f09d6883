# Every target sets up what it needs; run again, it is quick.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# One thread for each of the parallel test processes: more only fight over the cores.
ONE_THREAD := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1

# What a GPU shows that the interpreter cannot.
GPU_TESTS := $(patsubst %,tests/test_%.py,components kernels feed_forward links launch cuda replay augment dense)

.PHONY: demo test test-slow test-gpu lint bench-cpu clean

demo: $(READY)
	$(BIN)/asc demo --out demo

test: lint
	$(ONE_THREAD) $(BIN)/python -m pytest -n auto -m "not slow"

# The long checks: every start of the threshold, both neighbourhoods, more seeds.
test-slow: $(READY)
	$(ONE_THREAD) $(BIN)/python -m pytest -n auto -m slow

test-gpu: $(READY)
	$(BIN)/python -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "PyTorch finds no GPU here")'
	$(ONE_THREAD) $(BIN)/python -m pytest -n 8 -m "not slow" $(GPU_TESTS)

lint: $(READY)
	$(BIN)/ruff check asc tests benchmarks
	$(BIN)/ruff format --check asc tests benchmarks
	$(BIN)/mypy

bench-cpu: $(READY)
	$(BIN)/python benchmarks/cpu_forward.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ASC needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv demo superpixels .pytest_cache .mypy_cache .ruff_cache
