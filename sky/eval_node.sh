#!/usr/bin/env bash
# Measure a run's tool-call accuracy on this node; answers and an HTML page go to the run's eval/.
#
#   RUN=runs/llama3_1_8b_lora SUITE=smoke sky/eval_node.sh
#
# RUN is relative to FCTUNE_SHARED, an absolute path, or hf:NAME@REVISION; SUITE is a suite's name, or a JSONL file with
# your own cases.
set -euo pipefail
cd "$(dirname "$0")/.."
[ ! -d .venv ] || PATH=$PWD/.venv/bin:$PATH
export PYTHONSAFEPATH=1 # no file of this folder is imported instead of a package

: "${RUN:?usage: RUN=runs/llama3_1_8b_lora $0}"
suite=${SUITE:-smoke}
export FCTUNE_SHARED=${FCTUNE_SHARED:-/mnt/shared}
export HF_HOME=${HF_HOME:-$FCTUNE_SHARED/huggingface}
case $RUN in
  hf:*) model=$RUN out=$FCTUNE_SHARED/eval/${RUN##*/} ;;
  /*) model=$RUN out=$RUN/eval ;;
  *) model=$FCTUNE_SHARED/$RUN out=$FCTUNE_SHARED/$RUN/eval ;;
esac
mkdir -p "$out"
name=$(basename "$suite" .jsonl)
python -m fctune.cli eval --model "$model" --suite "$suite" --out "$out/$name.jsonl" --html "$out/$name.html"
