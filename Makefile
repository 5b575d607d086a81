# Every target but gpu does its own set-up: a fresh clone needs only make and Python >= 3.10 with venv.
PYTHON ?= python3
VENV ?= .venv
OUTPUT ?= outputs/demo
ARGS ?=
SHARD ?=
NAME ?=
REPOSITORY ?=

BIN := $(VENV)/bin
# Two processes take files in turn: while one waits, the other computes. ARGS="-n 0" leaves one, for a debugger.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint tools/constraints/cpu.txt

# One thread per process: the worker processes share the cores.
demo test test-fast test-times matrix compat mutants faults table suite: export OMP_NUM_THREADS := 1
# Commands that tests start compile nothing anew, where the environment turns the cache of compiled files off.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-times bench gpu matrix compat mutants faults table suite count lint dist docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed ## fine-tune a small model with LoRA on four processes (2-way FSDP2 x 2-way TP)
	$(BIN)/python examples/lightning_sft.py --strategy lora_fsdp2_tp --tp 2 --devices 4 \
		--accelerator cpu --output $(OUTPUT) $(ARGS)

test: $(VENV)/.dev ## run the tests; ARGS="-k styles" is passed to pytest
	$(PYTEST) $(ARGS)

test-fast: $(VENV)/.dev ## run the tests that start no processes, while you edit
	$(PYTEST) -m "not processes and not matrix" $(ARGS)

test-times: $(VENV)/.dev ## run the tests, and say what their seconds went into, by folder and by kind of work
	$(BIN)/python -m pytest -p tests.times --durations=0 --durations-min=0.05 $(ARGS)

bench: $(VENV)/.dev ## measure NAME=step, load, save, loss, scale, tenants, pipeline, host, generate, frames, dropout, bytes or planning; ARGS=--short for a look
	$(BIN)/python benchmarks/$(or $(NAME),step).py $(ARGS)

# No set-up: on a machine with GPUs torch and its CUDA are the user's own, and there may be no network.
gpu: ## check and time everything on this machine's GPUs, with PYTHON's own packages, into docs/results/gpu.md
	$(PYTHON) -m benchmarks.gpu $(ARGS)

matrix: $(VENV)/.dev ## run what make test leaves out: its tests on more meshes, with more models; SHARD=2/4 a part of it
	$(PYTEST) -m matrix $(if $(SHARD),--shard $(SHARD)) $(ARGS)

# No .venv: each has an environment of its own, made anew with PYTHON, and takes what the index has that day.
count: ## count statements, lines and files by district, tests, and pages and words of the docs
	python3 tools/count.py

compat: ## test the oldest versions that pyproject.toml allows, and the newest of the package index; PYTHON=python3.13
	for versions in oldest newest; do \
		echo "The $$versions versions with $(PYTHON)" && \
		$(PYTHON) -m venv --clear build/compat/$$versions && \
		build/compat/$$versions/bin/python -m pip install --quiet --disable-pip-version-check --editable . \
			$$([ $$versions = newest ] || echo --constraint tools/constraints/oldest.txt) 'pytest>=9' pytest-timeout pytest-xdist && \
		build/compat/$$versions/bin/python -m pip list | grep -E '^(torch|lightning|accelerate|peft|transformers) ' && \
		build/compat/$$versions/bin/python -m pytest -n 2 --dist loadfile tests/test_oracle.py \
			tests/lora_parallel/test_fidelity.py tests/lora_parallel/runtime/test_compiled_blocks.py \
			tests/accelerate_plugin/test_patches.py $(ARGS) || exit; \
	done

mutants: $(VENV)/.dev ## break the product in one place after the other, and see that a test fails; SHARD=2/4 a part of it
	$(BIN)/python -m tests.mutants $(if $(SHARD),--shard $(SHARD)) $(ARGS)

faults: $(VENV)/.dev ## kill training jobs and fill their disks at random instants, and let them go on
	FAULTS=20 $(BIN)/python -m pytest -m processes tests/lora_parallel/checkpoint/test_faults.py $(ARGS)

table: $(VENV)/.dev ## hold NAME=oracle, model, peer, optimizer, trainer, memory, plan or classes against one process, into its page of docs/
	$(BIN)/python -m benchmarks.$(or $(NAME),oracle)$(if $(filter optimizer trainer plan,$(NAME)),s) $(ARGS)

suite: $(VENV)/.dev ## run NAME=applications (ARGS="trl swift" some) or gemma alone and on meshes, into their pages of docs/
	$(BIN)/python -m benchmarks.$(or $(NAME),applications) $(ARGS)

lint: $(VENV)/.dev ## ruff, ruff format, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The README's links to files work on a package index with REPOSITORY=https://... only: tools/release/prepare.py.
dist: $(VENV)/.installed ## build wheel and sdist into dist/, check them, and try both flags in a bare environment
	rm -rf build dist
	$(INSTALL) build twine
ifeq ($(REPOSITORY),)
	@echo "No REPOSITORY=https://... is given: links of the README will lead nowhere on a package index."
	$(BIN)/python -m build --outdir dist .
else
	$(BIN)/python tools/release/prepare.py $(REPOSITORY) build/source
	$(BIN)/python -m build --outdir dist build/source
endif
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv dist/bare
	dist/bare/bin/python -m pip install --quiet --disable-pip-version-check --constraint tools/constraints/cpu.txt dist/*.whl
	cd dist && bare/bin/python -c "import lightning, lightning_lora; \
		print(lightning.Trainer(strategy='lora_fsdp2_tp', accelerator='cpu', devices=2).strategy)"
	cd dist && echo "from accelerate import Accelerator; print(Accelerator().state.fsdp_plugin.__class__)" > flag.py && \
		bare/bin/accelerate-lora config --config_file mesh.yaml --num_processes 2 --num_machines 1 --tp_size 2 \
			--dp_replicate_size 1 --mixed_precision no --activation_checkpointing no && \
		bare/bin/accelerate-lora launch --config_file mesh.yaml flag.py

docs: $(VENV)/.docs ## build the site into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean: ## remove outputs and caches, not the virtual environment
	rm -rf build dist site outputs benchmarks/out checkpoints lightning_logs *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(VENV)/.installed: pyproject.toml tools/constraints/cpu.txt
	@echo "Setting up $(VENV), about a minute"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable '.[examples]'
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	@echo "Adding what the tests need to $(VENV)"
	$(INSTALL) --editable '.[dev]'
	touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(INSTALL) --editable '.[docs]'
	touch $@
