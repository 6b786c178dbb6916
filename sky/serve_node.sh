#!/usr/bin/env bash
# Serve a run's export with vLLM's OpenAI-compatible API, until STOP_IDLE minutes have passed without a request.
#
#   RUN=runs/llama3_1_8b_lora VLLM_API_KEY=... STOP_IDLE=30 sky/serve_node.sh
#
# RUN is relative to FCTUNE_SHARED, or an absolute path. VLLM_PYTHON is a Python with vLLM.
set -euo pipefail
cd "$(dirname "$0")/.."
[ ! -d .venv ] || PATH=$PWD/.venv/bin:$PATH
export PYTHONSAFEPATH=1 # no file of this folder is imported instead of a package

: "${RUN:?usage: RUN=runs/llama3_1_8b_lora $0}"
if [ -z "${VLLM_API_KEY:-}" ]; then
  echo "$0: VLLM_API_KEY is empty, so anyone could use the API. Export one; with SkyPilot, also pass --secret VLLM_API_KEY" >&2
  exit 2
fi
case $RUN in
  /*) model=$RUN ;;
  *) model=${FCTUNE_SHARED:-/mnt/shared}/$RUN ;;
esac
exec python -m fctune.cli serve "$model" --python "${VLLM_PYTHON:-.vllm/bin/python}" --port "${PORT:-8000}" \
  --stop-idle "${STOP_IDLE:-0}"
