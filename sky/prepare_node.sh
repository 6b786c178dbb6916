#!/usr/bin/env bash
# Download the models and data sets of a run and prepare its rows, on one node without GPUs.
#
#   CONFIG=configs/llama3_1_8b_lora.yaml sky/prepare_node.sh [key=value ...]     # or MODEL_SIZE=8B
#
# Takes the same variables and overrides as sky/run_node.sh, which finds the result on FCTUNE_SHARED. After an
# interruption, run it again: downloads resume, and unfinished rows start over.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
[ ! -x .venv/bin/tune ] || PATH=$PWD/.venv/bin:$PATH
export PYTHONSAFEPATH=1 # no file of this folder is imported instead of a package

config=${CONFIG:-${MODEL_SIZE:-}}
: "${config:?usage: CONFIG=configs/llama3_1_8b_lora.yaml $0 [key=value ...], or MODEL_SIZE=8B}"
export FCTUNE_SHARED=${FCTUNE_SHARED:-/mnt/shared}
export HF_HOME=${HF_HOME:-$FCTUNE_SHARED/huggingface} FCTUNE_CACHE=${FCTUNE_CACHE:-$FCTUNE_SHARED/cache}

exec python -m fctune.cli preflight --prepare --config "$config" "$@"
