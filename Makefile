# Two commands are all you need: `make demo` and `make test`. Both set up .venv first.
# While you work: `make quick`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Containers often forbid Python to store what it compiles. Each process then compiles PyTorch and the
# rest anew, which takes longer than a short run: for what is started here, Python may.
export PYTHONDONTWRITEBYTECODE :=
# What a user needs; the tools of developers come on top.
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready
# Where PyTorch for CPUs comes from if there is no NVIDIA driver; empty: from the package index.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# What only the comparisons with other libraries need.
BENCH := $(VENV)/.ready-bench
# What only runs with actors on ray need.
RAY := $(VENV)/.ready-ray
# RLlib asks for one version of gymnasium, so its comparisons have an environment of their own, which
# sees the packages of $(VENV).
RLLIB_VENV := .venv-rllib
RLLIB := $(RLLIB_VENV)/.ready
# What only the site of the docs needs.
DOCS := $(VENV)/.ready-docs

.PHONY: demo lint types warm quick quick-tests test test-all steady test-gpu gpu-check docs wheel screenshots clean bench-suite bench-policy bench-observation bench-tasks bench-recipes bench-world bench-memory bench-long-runs bench-cifar soak mutation torture bench-records bench-slots bench-hot-path bench-scaling bench-schedules bench-impala bench-offline bench-ray bench-rllib bench-precision bench-sanctum bench-gym bench-gym-defaults bench-growth-learners bench-text bench-own

demo: $(INSTALLED)
	$(BIN)/esper train ppo --task digits_shift --slots wide --envs 16 --rounds 13

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks scripts examples
	$(BIN)/ruff format --check src tests benchmarks scripts examples

types: $(READY)
	$(BIN)/mypy

# The fastest tests of every package: the rest of a package comes with `make test`.
QUICK := test_layers.py test_release.py test_docstrings.py leyline runtime/test_tasks.py runtime/test_data.py runtime/test_plugins.py \
  kasmina/test_rng.py kasmina/test_stack_layout.py kasmina/test_hosts.py kasmina/test_lifecycle.py \
  tolaria/test_optim.py tolaria/test_signals.py tolaria/test_bank.py tolaria/test_minibatches.py \
  tolaria/test_measure_oracle.py tamiyo/policy/test_features.py tamiyo/policy/test_factored_lstm.py \
  simic/test_advantage.py simic/test_loss.py simic/test_optimizer.py simic/test_rollout.py \
  simic/graphs/test_capture.py simic/impala/test_vtrace.py simic/distributed/test_wire.py simic/growth/test_host_families.py simic/gym/test_gym_acting.py simic/run/test_checkpoint.py simic/records/test_damaged_records.py \
  simic/test_trainer.py simic/algorithms/test_algorithms.py simic/offline/test_offline_methods.py \
  simic/training/test_decisions.py own_models/test_never_grow.py lab/test_diagnosis.py lab/test_plans.py nissa/test_trackers.py \
  karn/test_runs.py karn/sanctum/test_log.py karn/sanctum/test_signs.py scripts/test_runs_command.py

quick-tests: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow" $(addprefix tests/,$(QUICK))

quick: $(READY)
	$(MAKE) --jobs=2 --output-sync lint types quick-tests

# What every worker of the tests would else do first, beside the checks of types, which take one core.
warm: $(READY)
	-OMP_NUM_THREADS=1 $(BIN)/python -c "from esper.native.library import library; library()"
	-OMP_NUM_THREADS=1 $(BIN)/pytest --collect-only -m "not slow" > /dev/null

test: $(READY)
	$(MAKE) --jobs=2 --output-sync lint types warm
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not slow"

# Ten green runs beside two busy loops: no test may depend on how fast anything is.
steady: $(READY)
	scripts/steady.sh 10

test-all: test $(RAY) $(RLLIB)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow
	OMP_NUM_THREADS=1 $(RLLIB_VENV)/bin/python -m pytest -m slow tests/simic/impala/test_vtrace.py

test-gpu: $(READY)
	$(BIN)/pytest -m gpu

# Nine minutes on a GPU: everything that no CPU can show, in benchmarks/results/gpu_check.md.
gpu-check: $(READY)
	$(BIN)/python scripts/gpu_check.py

# With the compiled library in it, for this kind of processor: installing it needs no compiler.
wheel: $(READY)
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=true $(BIN)/python -m build --wheel --no-isolation

# The site, in site/; a warning is an error.
docs: $(DOCS)
	$(BIN)/python scripts/build_site.py

bench-suite: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/suite.py --write
	$(BIN)/python scripts/write_figures.py

# Eight controllers that learn from records, what else they could learn from the same, and policies
# that act while they learn, for two families: about seven hours on one core, resumable.
bench-policy: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/policy.py --write
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/policy.py --family adaptation --write
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/policy_suite.py --write
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/policy_diagnosis.py --write
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/policy_online.py --write
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/growth_defaults.py --write
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/capacity_ladder.py --write
	$(BIN)/python scripts/write_figures.py

bench-observation: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/observation.py --write

bench-hot-path: $(READY)
	$(BIN)/python scripts/benchmark_hot_path.py --json benchmarks/results/hot_path_digits.json
	$(BIN)/python scripts/benchmark_hot_path.py --task pixels --envs 16 --episode-length 10 --json benchmarks/results/hot_path_pixels.json
	$(BIN)/python scripts/benchmark_hot_path.py --task pixels --envs 16 --batch-size 128 --episode-length 10 --json benchmarks/results/hot_path_pixels_128.json
	$(BIN)/python scripts/benchmark_hot_path.py --task wide_32 --envs 16 --episode-length 10 --json benchmarks/results/hot_path_wide_32.json
	$(BIN)/python scripts/benchmark_hot_path.py --task wide_128 --envs 16 --episode-length 10 --json benchmarks/results/hot_path_wide_128.json
	$(BIN)/python scripts/benchmark_hot_path.py --task wide_32 --envs 16 --episode-length 10 --amp --backend native --json benchmarks/results/hot_path_wide_32_bfloat16.json
	$(BIN)/python scripts/benchmark_hot_path.py --task wide_128 --envs 16 --episode-length 10 --amp --backend native --json benchmarks/results/hot_path_wide_128_bfloat16.json
# On a processor with AMX:
#	python scripts/benchmark_hot_path.py --task wide_32 --envs 16 --episode-length 10 --amp --backend native --json benchmarks/results/hot_path_wide_32_amx.json
#	python scripts/benchmark_hot_path.py --task wide_128 --envs 16 --episode-length 10 --amp --backend native --json benchmarks/results/hot_path_wide_128_amx.json
	$(BIN)/python scripts/benchmark_hot_path.py --task pixels_tiny --episode-length 40 --json benchmarks/results/hot_path_pixels_tiny.json
	$(BIN)/python scripts/benchmark_hot_path.py --task digits_mlp --episode-length 20 --json benchmarks/results/hot_path_mlp.json
	$(BIN)/python scripts/benchmark_hot_path.py --task text_gpt --envs 16 --episode-length 10 --json benchmarks/results/hot_path_text.json
	$(BIN)/python scripts/write_figures.py

bench-scaling: $(READY)
	$(BIN)/python benchmarks/scaling.py --write
	$(BIN)/python benchmarks/policy_update.py --write

bench-schedules: $(READY)
	$(BIN)/python benchmarks/schedules.py --write

bench-impala: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/impala_lag.py --write

bench-ray: $(RAY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/ray_faults.py --write

bench-rllib: $(RLLIB)
	OMP_NUM_THREADS=1 $(RLLIB_VENV)/bin/python benchmarks/rllib_impala.py --write

bench-offline: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/offline.py --write

bench-memory: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/memory.py --write

bench-long-runs: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/long_runs.py --write

# An hour on two cores.
bench-cifar: $(READY)
	$(BIN)/python benchmarks/cifar_hour.py --write

# Two hours of training: does its memory grow?
soak: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py --minutes 120 --write

# Faults put into a copy of the source: do the tests notice? Some hours, resumable.
mutation: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/mutation.py --write

# An hour and a half on two cores, resumable.
torture: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/torture/run.py --write

bench-records: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/records.py --write

bench-slots: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/slot_measures.py --write

bench-precision: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/precision.py --write

bench-sanctum: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/sanctum_frame.py --write

bench-text: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/text.py --write

screenshots: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/make_screenshots.py
	OMP_NUM_THREADS=1 $(BIN)/python scripts/draw_growth.py

bench-gym: $(BENCH)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/gym_speed.py --write
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/cartpole_speed.py --write

bench-growth-learners: $(BENCH)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/growth_learners.py --write

bench-gym-defaults: $(BENCH)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/gym_defaults.py --write
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/gym_defaults.py --algorithm impala --only CartPole --seeds 3 --write

bench-own: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/own_models.py --write
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/own_model_results.py --write
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/widening.py --write
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/capacity_page.py --write

bench-tasks: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/tasks.py --write
	$(BIN)/python scripts/write_figures.py

bench-recipes: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/recipes.py --write

bench-world: $(READY)
	$(BIN)/python benchmarks/world.py --write
	$(BIN)/python benchmarks/example_ladder.py --write
	$(BIN)/python scripts/write_figures.py


$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Esper needs Python 3.11 or newer; make PYTHON=python3.11 ...")'
	PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" scripts/set_up.sh $(VENV) report,tui
	@touch $@

$(READY): $(INSTALLED)
	@echo "The tools of developers and the other extras take another 0.5 GB in $(VENV)."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

$(BENCH): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]"
	touch $@

$(RAY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[ray]"
	touch $@

$(RLLIB): $(READY)
	$(PYTHON) -m venv $(RLLIB_VENV)
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > "$$($(RLLIB_VENV)/bin/python -c 'import site; print(site.getsitepackages()[0])')/esper.pth"
	grep -v '^gymnasium==' constraints.txt > $(RLLIB_VENV)/constraints.txt
	$(RLLIB_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(RLLIB_VENV)/constraints.txt "ray[rllib]>=2.40"
	touch $@

$(DOCS): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

clean:
	rm -rf site $(VENV) $(RLLIB_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
