# Every target but gpu does its own set-up: a fresh clone needs only make and Python >= 3.10 with venv.
PYTHON ?= python3
VENV ?= .venv
OUTPUT ?= outputs/demo
ARGS ?=
SHARD ?=
REPOSITORY ?=

BIN := $(VENV)/bin
# Two processes take files in turn: while one waits, the other computes. ARGS="-n 0" leaves one, for a debugger.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints/cpu.txt

# One thread per process: the worker processes share the cores.
demo test test-fast test-times matrix mutants faults oracle-table optimizer-table trainer-table memory-table: export OMP_NUM_THREADS := 1
# Commands that tests start compile nothing anew, where the environment turns the cache of compiled files off.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-times matrix mutants faults oracle-table optimizer-table trainer-table memory-table plan-tables bench bench-load bench-save bench-loss bench-scale bench-tenants bench-pipeline bench-host bench-dropout gpu lint dist docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed ## fine-tune a small model with LoRA on four processes (2-way FSDP2 x 2-way TP)
	$(BIN)/python examples/lightning_sft.py --strategy lora_fsdp2_tp --tp 2 --devices 4 \
		--accelerator cpu --output $(OUTPUT) $(ARGS)

test: $(VENV)/.dev ## run the tests; ARGS="-k styles" is passed to pytest
	$(PYTEST) $(ARGS)

test-fast: $(VENV)/.dev ## run the tests that start no processes, while you edit
	$(PYTEST) -m "not processes and not matrix" $(ARGS)

test-times: $(VENV)/.dev ## run the tests, and say what their seconds went into, by folder and by kind of work
	$(BIN)/python -m pytest -p tests.times --durations=0 --durations-min=0.05 $(ARGS)

bench: $(VENV)/.dev ## time a training step against PEFT, FSDP2, Accelerate, Lightning; ARGS=--short for a look
	$(BIN)/python benchmarks/step.py $(ARGS)

bench-load: $(VENV)/.dev ## measure loading from meta against other ways of loading
	$(BIN)/python benchmarks/load.py $(ARGS)

bench-save: $(VENV)/.dev ## measure saving from shards against other ways of saving
	$(BIN)/python benchmarks/save.py $(ARGS)

bench-loss: $(VENV)/.dev ## measure the loss from slices of the logits against gathered ones
	$(BIN)/python benchmarks/loss.py $(ARGS)

bench-scale: $(VENV)/.dev ## measure what sharding 70B, 405B and 671B costs a rank, on simulated ranks
	$(BIN)/python benchmarks/scale.py $(ARGS)

bench-tenants: $(VENV)/.dev ## measure batched tenants against one after the other and PEFT's switching
	$(BIN)/python benchmarks/tenants.py $(ARGS)

bench-pipeline: $(VENV)/.dev ## simulate and draw pipeline schedules, and measure pp 2 against tp 2 and dp_shard 2
	$(BIN)/python benchmarks/pipeline.py $(ARGS)

bench-host: $(VENV)/.dev ## measure the host's processor time in an eager step, by phase; ARGS=--short for a look
	$(BIN)/python benchmarks/host.py $(ARGS)

bench-dropout: $(VENV)/.dev ## count kernels and bytes of LoRA dropout against torch's own dropout
	$(BIN)/python benchmarks/dropout.py $(ARGS)

# No set-up: on a machine with GPUs torch and its CUDA are the user's own, and there may be no network.
gpu: ## check and time everything on this machine's GPUs, with PYTHON's own packages, into docs/gpu.md
	$(PYTHON) -m benchmarks.gpu $(ARGS)

matrix: $(VENV)/.dev ## run what make test leaves out: its tests on more meshes, with more models; SHARD=2/4 a part of it
	$(PYTEST) -m matrix $(if $(SHARD),--shard $(SHARD)) $(ARGS)

mutants: $(VENV)/.dev ## break the product in one place after the other, and see that a test fails; SHARD=2/4 a part of it
	$(BIN)/python -m tests.mutants $(if $(SHARD),--shard $(SHARD)) $(ARGS)

faults: $(VENV)/.dev ## kill training jobs and fill their disks at random instants, and let them go on
	FAULTS=20 $(BIN)/python -m pytest -m processes tests/lora_parallel/checkpoint/test_faults.py $(ARGS)

oracle-table: $(VENV)/.dev ## hold every model family and feature against one process, into docs/oracle.md
	$(BIN)/python -m benchmarks.oracle $(ARGS)

optimizer-table: $(VENV)/.dev ## hold every kind of optimizer against one process, into docs/optimizers.md
	$(BIN)/python -m benchmarks.optimizers $(ARGS)

trainer-table: $(VENV)/.dev ## hold TRL's trainers against one process, into docs/trainers.md
	$(BIN)/python -m benchmarks.trainers $(ARGS)

memory-table: $(VENV)/.dev ## hold predicted against measured memory, into docs/choosing_a_mesh.md
	$(BIN)/python -m benchmarks.memory $(ARGS)

plan-tables: $(VENV)/.dev ## plan runs of four models on four clusters, into docs/choosing_a_mesh.md
	$(BIN)/python -m benchmarks.plans $(ARGS)

lint: $(VENV)/.dev ## ruff, ruff format, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The README's links to files work on a package index with REPOSITORY=https://... only: release/prepare.py.
dist: $(VENV)/.installed ## build wheel and sdist into dist/, check them, and try both flags in a bare environment
	rm -rf build dist
	$(INSTALL) build twine
ifeq ($(REPOSITORY),)
	@echo "No REPOSITORY=https://... is given: links of the README will lead nowhere on a package index."
	$(BIN)/python -m build --outdir dist .
else
	$(BIN)/python release/prepare.py $(REPOSITORY) build/source
	$(BIN)/python -m build --outdir dist build/source
endif
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv dist/bare
	dist/bare/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints/cpu.txt dist/*.whl
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

$(VENV)/.installed: pyproject.toml constraints/cpu.txt
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
