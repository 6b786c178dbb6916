#!/usr/bin/env bash
# Install one node's software in .venv, unless the image already contains it. SkyPilot runs this before a task.
#
#   sky/setup.sh
set -euo pipefail
cd "$(dirname "$0")/.."

# A managed job on Slurm that sky/run_node.sh has ended for good, though SkyPilot starts it again.
launch_id=${SKYPILOT_TASK_ID:-}
final=${FCTUNE_SHARED:-/mnt/shared}/restarts/${launch_id//[^[:alnum:]_.-]/-}.final
if [ -n "$launch_id" ] && [ -s "$final" ]; then
  echo "$0: the run has ended with exit code $(< "$final"), so it is not started again" >&2
  exit 1
fi

# Cloud volumes may be owned by root.
for mount in "${FCTUNE_SHARED:-/mnt/shared}" "${FCTUNE_NETWORK:-/mnt/network}"; do
  if [ -d "$mount" ] && [ ! -w "$mount" ]; then
    sudo -n chown "$(id -u):$(id -g)" "$mount" || echo "$0: $mount is not writable, and its owner cannot be changed" >&2
  fi
done

# Nodes may share this folder (Slurm): the first one sets it up while the others wait.
exec 9> .setup.lock
flock 9

# SkyPilot puts its own Python first on the path, which hides the image's `python`.
tune=$(command -v tune || true)
if [ ! -e .venv ] && [ -n "$tune" ] && [ -x "${tune%/*}/fctune" ]; then
  ln -s "$(dirname "${tune%/*}")" .venv
fi
if [ -L .venv ]; then
  echo "using fctune from the image: $(readlink .venv)"
  exit 0
fi

is_fit='import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'
python=${PYTHON:-python3}
if ! "$python" -c "$is_fit" 2> /dev/null; then
  uv=$(command -v uv || echo "$HOME/.local/bin/uv") # SkyPilot installs it on every node
  [ -x "$uv" ] || { echo "$0: $python is not Python 3.11 or 3.12 with venv, and uv is not installed to get one" >&2; exit 1; }
  "$uv" python install --quiet 3.11
  python=$("$uv" python find 3.11)
fi
make setup PYTHON="$python"
