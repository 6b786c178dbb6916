#!/usr/bin/env bash
# One node's software, in .venv beside the code; nothing to do where the image has it. SkyPilot runs it before a task.
#
#   sky/setup.sh
set -euo pipefail
cd "$(dirname "$0")/.."

# A volume of the cloud may come as root's.
for mount in "${FCTUNE_SHARED:-/mnt/shared}" "${FCTUNE_NETWORK:-/mnt/network}"; do
  if [ -d "$mount" ] && [ ! -w "$mount" ]; then
    sudo -n chown "$(id -u):$(id -g)" "$mount" || echo "$0: $mount cannot be written, nor made writable" >&2
  fi
done

# Nodes may share this folder (Slurm): one sets it up, and the others find it done.
exec 9> .setup.lock
flock 9

# SkyPilot puts a Python of its own first on the path, so what the image has is not found by a bare `python`.
tune=$(command -v tune || true)
if [ ! -e .venv ] && [ -n "$tune" ] && [ -x "${tune%/*}/fctune" ]; then
  ln -s "$(dirname "${tune%/*}")" .venv
fi
if [ -L .venv ]; then
  echo "the image has fctune: $(readlink .venv)"
  exit 0
fi

is_fit='import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'
python=${PYTHON:-python3}
if ! "$python" -c "$is_fit" 2> /dev/null; then
  uv=$(command -v uv || echo "$HOME/.local/bin/uv") # SkyPilot brings it to every node
  [ -x "$uv" ] || { echo "$0: $python is not 3.11 or 3.12 with venv, and there is no uv to get one with" >&2; exit 1; }
  "$uv" python install --quiet 3.11
  python=$("$uv" python find 3.11)
fi
make setup TORCH="${TORCH:-cuda}" PYTHON="$python"
