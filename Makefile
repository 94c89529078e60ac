# Two commands are all one needs: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-all test-gpu bench-step bench-learning bench-suite bench-tasks bench-memory clean

demo: $(READY)
	$(BIN)/esper train ppo --task digits_shift --envs 16 --rounds 13

test: $(READY)
	$(BIN)/ruff check src tests benchmarks scripts
	$(BIN)/ruff format --check src tests benchmarks scripts
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not slow"

test-all: test
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow

test-gpu: $(READY)
	$(BIN)/pytest -m gpu

bench-step: $(READY)
	$(BIN)/python benchmarks/training_step.py --write

bench-learning: $(READY)
	$(BIN)/python benchmarks/learning.py --write

bench-suite: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/suite.py --write

bench-memory: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/memory.py --write

bench-tasks: $(READY)
	$(BIN)/python benchmarks/tasks.py --write

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Esper needs Python 3.11 or newer; make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
