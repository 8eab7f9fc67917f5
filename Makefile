# Everything runs in .venv, made from the Python named by PYTHON (3.11 or later) and the pins in constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Tests start hundreds of processes, each of which would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-fast test-gpu test-vllm lint docs bench trials fuzz soak compat wheel-check pages clean

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rollbook needs Python 3.11 or later; set PYTHON")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

RUN ?= runs/letters
demo: $(STAMP)  ## a tiny model learns to sort letters by GRPO, in about two minutes; then: .venv/bin/rollbook view runs/letters
	@$(BIN)/rollbook train --out $(RUN)

WORKERS ?= 2
test: $(STAMP) lint  ## lint, types, doctests, unit, property, conformance and attack tests; what they install: CONTRIBUTING.md
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

FAST := tests/algorithms tests/conformance tests/vectors tests/train/test_pipeline.py \
	tests/test_batch.py tests/test_experience.py tests/test_fields.py tests/test_planner.py tests/test_wire.py
test-fast: $(STAMP)  ## the tests to run while editing: records, batches, algorithms, the pipeline; no downloads
	$(BIN)/python -m pytest -n $(WORKERS) -x -m 'not downloads and not slow' $(FAST)

test-gpu:  ## on a machine with a CUDA device, with the Python that has its torch: what only a device shows
	PYTHONPATH=src $(PYTHON) -m pytest tests_gpu
	PYTHONPATH=src $(PYTHON) -m benchmarks.bench_device
	PYTHONPATH=src $(PYTHON) -m benchmarks.bench_generation
	PYTHONPATH=src $(PYTHON) -m benchmarks.bench_kernels
	PYTHONPATH=src $(PYTHON) -m benchmarks.bench_rollouts
	PYTHONPATH=src $(PYTHON) -m benchmarks.bench_training

VLLM_PYTHON ?= $(CURDIR)/.vllm/bin/python
test-vllm: $(STAMP)  ## engines against real servers and vLLM in process: its CPU build in .vllm/ (about 4 GB), transformers serve
	@test "$(VLLM_PYTHON)" != "$(CURDIR)/.vllm/bin/python" || $(BIN)/python tests_vllm/install.py .vllm
	VLLM_PYTHON=$(VLLM_PYTHON) $(BIN)/python -m pytest -s tests_vllm
	PYTHONPATH=src $(VLLM_PYTHON) -m pytest -s tests_vllm/test_in_process.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff check --quiet --preview --select PLC2701 src
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_names.py src

bench: $(STAMP)  ## side by side with peers and the hardware's bounds; installs the peer into .bench/
	$(BIN)/python -m benchmarks --json benchmarks/results/bench.json
	$(BIN)/python -m benchmarks.bench_viewer_data

trials: $(STAMP)  ## longer runs that show learning: the demo over seeds with the random-reward control, the examples, crashes
	$(BIN)/python -m benchmarks.trial_letters --what letters ppo calculator colors
	$(BIN)/python -m tests.train.trials crash --kills 60

docs: $(STAMP)  ## the documentation and API reference as a site in build/docs; warnings are errors
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs

pages: $(STAMP)  ## docs that are made from the code
	$(BIN)/python docs/config_page.py > docs/configuration.md

FUZZ_FRAMES ?= 200000
fuzz: $(STAMP)  ## mutated frames in child processes, with and without python -O; every property test with more examples
	$(BIN)/python -m tests.attacks.fuzz --frames $(FUZZ_FRAMES)
	$(BIN)/python -m pytest -n $(WORKERS) -m hypothesis --hypothesis-profile=long tests

SOAK_KILLS ?= 500
SOAK_FAULTS ?= 100
SOAK_RANK_KILLS ?= 20
SOAK_RAY_ROUNDS ?= 3
SOAK_WORKER_KILLS ?= 100
soak: $(STAMP)  ## the book under faults: processes killed and paused, servers restarted, connections cut; training on several ranks
	$(BIN)/python -m tests.book.trials crash --kills $(SOAK_KILLS) --url folder
	$(BIN)/python -m tests.book.trials crash --kills $(SOAK_KILLS) --url postgresql
	$(BIN)/python -m tests.book.trials concurrency --url folder
	$(BIN)/python -m tests.book.trials concurrency --url postgresql
	$(BIN)/python -m tests.book.trials opening --url folder
	$(BIN)/python -m tests.book.trials opening --url postgresql
	$(BIN)/python -m tests.book.trials faults --kind restart --count $(SOAK_FAULTS)
	$(BIN)/python -m tests.book.trials faults --kind cut --count $(SOAK_FAULTS)
	$(BIN)/python -m tests.book.trials faults --kind proxy --count $(SOAK_FAULTS)
	$(BIN)/python -m tests.book.trials faults --kind pause --count $(SOAK_FAULTS) --url folder
	$(BIN)/python -m tests.book.trials faults --kind pause --count $(SOAK_FAULTS)
	$(BIN)/python -m tests.book.trials faults --kind hold --count 3
	$(BIN)/python -m tests.train.ranks --ranks 2 3 --kills $(SOAK_RANK_KILLS)
	$(BIN)/python -m tests.train.ray_trials --rounds $(SOAK_RAY_ROUNDS)
	$(BIN)/python -m tests.train.worker_trials --kills $(SOAK_WORKER_KILLS)

COMPAT_PYTHON ?= python3.12
COMPAT_TORCH ?= 2.11.0
compat:  ## the tests on another Python and torch (downloads that torch from the package index)
	@test -x .compat/bin/python || $(COMPAT_PYTHON) -m venv .compat
	.compat/bin/python -m pip install --quiet --disable-pip-version-check 'torch==$(COMPAT_TORCH)' -e '.[dev]'
	.compat/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

wheel-check: $(STAMP)  ## the wheel in a clean environment: its files, a short run of the demo, the viewer (takes minutes)
	$(BIN)/python -m tests.wheel_check

clean:
	rm -rf $(VENV) .compat .bench .vllm .postgres build dist src/*.egg-info
