# Two commands are all one needs: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# What only the comparisons with other libraries need.
BENCH := $(VENV)/.ready-bench

.PHONY: demo test test-all test-gpu screenshots clean bench-step bench-learning bench-suite bench-tasks bench-memory bench-hot-path bench-scaling bench-schedules bench-precision bench-sanctum bench-gym bench-gym-proofs bench-text bench-bookkeeping

demo: $(READY)
	$(BIN)/esper train ppo --task digits_shift --envs 16 --rounds 13

test: $(READY)
	$(BIN)/ruff check src tests benchmarks scripts examples
	$(BIN)/ruff format --check src tests benchmarks scripts examples
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

bench-hot-path: $(READY)
	$(BIN)/python scripts/benchmark_hot_path.py --json benchmarks/results/hot_path_digits.json
	$(BIN)/python scripts/benchmark_hot_path.py --task pixels --envs 16 --episode-length 10 --json benchmarks/results/hot_path_pixels.json
	$(BIN)/python scripts/benchmark_hot_path.py --task pixels_tiny --episode-length 40 --json benchmarks/results/hot_path_pixels_tiny.json

bench-scaling: $(READY)
	$(BIN)/python benchmarks/scaling.py --write
	$(BIN)/python benchmarks/policy_update.py --write

bench-schedules: $(READY)
	$(BIN)/python benchmarks/schedules.py --write

bench-memory: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/memory.py --write

bench-precision: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/precision.py --write

bench-sanctum: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/sanctum_frame.py --write

bench-text: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/text.py --write

bench-bookkeeping: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bookkeeping.py --write

screenshots: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/make_screenshots.py

bench-gym: $(BENCH)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/gym_speed.py --write

bench-gym-proofs: $(BENCH)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/gym_proofs.py --write

bench-tasks: $(READY)
	$(BIN)/python benchmarks/tasks.py --write

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Esper needs Python 3.11 or newer; make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

$(BENCH): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
