#!/usr/bin/env bash
# Run one node's part of an acceptance run, with one process per device. Exit code 0 for the verdict PASS, 1 for any
# other, 2 for an invalid config. Node 0 writes OUT/acceptance.json and OUT/acceptance.html.
#
#   NUM_NODES=2 NODE_RANK=0 DEVICES=8 MASTER_ADDR=node-0 sky/acceptance_node.sh configs/acceptance_2x8_h100.yaml OUT [key=value ...]
#
# Under Slurm, the first three are taken from its variables (one task per node).
#
# Does not use torchrun, which starts no rank before all nodes have joined, so that a missing node could not be named.
set -uo pipefail

usage="usage: NUM_NODES=N NODE_RANK=R DEVICES=D MASTER_ADDR=HOST $0 CONFIG OUT [key=value ...]"
config=${1:?$usage} out=${2:?$usage}
shift 2
NUM_NODES=${NUM_NODES:-${SLURM_NNODES:-}} NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-}} DEVICES=${DEVICES:-${SLURM_GPUS_ON_NODE:-}}
export WORLD_SIZE=$((${NUM_NODES:?$usage} * ${DEVICES:?$usage})) LOCAL_WORLD_SIZE=$DEVICES
export MASTER_ADDR=${MASTER_ADDR:?$usage} MASTER_PORT=${MASTER_PORT:-29400}
python=${PYTHON:-.venv/bin/python}
export PYTHONSAFEPATH=1 # no file of this folder is imported instead of a package

pids=()
trap 'kill -TERM "${pids[@]}" 2>/dev/null' INT TERM
for ((device = 0; device < DEVICES; device++)); do
  RANK=$((${NODE_RANK:?$usage} * DEVICES + device)) LOCAL_RANK=$device \
    "$python" "$(dirname "$0")/../recipes/cluster_acceptance.py" --config "$config" "output_dir=$out" "$@" &
  pids+=($!)
done

code=0
for pid in "${pids[@]}"; do
  # A signal interrupts wait while the process is still writing its result.
  wait "$pid"; ended=$?
  while kill -0 "$pid" 2>/dev/null; do wait "$pid"; ended=$?; done
  case $ended in
    0) ;;
    2) code=2 ;;
    *) [ "$code" = 2 ] || code=1 ;;
  esac
done

if [ "$NODE_RANK" = 0 ] && [ -f "$out/acceptance.json" ]; then
  "$python" -m fctune.cli acceptance report "$out" --html "$out/acceptance.html" >/dev/null
fi
exit $code
