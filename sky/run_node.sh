#!/usr/bin/env bash
# One node's part of a run: is the cluster fit, then train. The only place that starts torchrun.
#
#   CONFIG=configs/llama3_1_8b_lora.yaml sky/run_node.sh [key=value ...]
#
# The nodes are read from SkyPilot, else from Slurm (one task a node); by hand, the same on each of them but NODE_RANK:
#
#   NUM_NODES=2 NODE_RANK=0 MASTER_ADDR=node-0 CONFIG=... sky/run_node.sh
#
# CONFIG and the other choices that are read stand in .env.example. Exit codes: 0 done, 1 a failed check or run, 2 wrong
# config or data, 75 asked to stop and saved: run the same command to go on.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
[ ! -x .venv/bin/tune ] || PATH=$PWD/.venv/bin:$PATH

config=${CONFIG:?usage: CONFIG=configs/llama3_1_8b_lora.yaml $0 [key=value ...]}
nodes=${SKYPILOT_NUM_NODES:-${SLURM_NNODES:-${NUM_NODES:-1}}}
node=${SKYPILOT_NODE_RANK:-${SLURM_NODEID:-${NODE_RANK:-0}}}
port=${MASTER_PORT:-$((29500 + ${SLURM_JOB_ID:-0} % 500))}
if [ -n "${SKYPILOT_NODE_IPS:-}" ]; then
  head=$(head -n1 <<< "$SKYPILOT_NODE_IPS")
elif [ -n "${SLURM_JOB_NODELIST:-}" ] && [ -z "${MASTER_ADDR:-}" ]; then
  head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
else
  head=${MASTER_ADDR:-127.0.0.1}
fi
gpus=${SKYPILOT_NUM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-$(nvidia-smi -L 2>/dev/null | wc -l)}}
[ -z "${FCTUNE_CPU_RANKS:-}" ] || gpus=0
ranks=${FCTUNE_CPU_RANKS:-$gpus}
[ "$ranks" -gt 0 ] || { echo "$0: no GPU on $(hostname); on a machine without, set FCTUNE_CPU_RANKS=N" >&2; exit 1; }

export FCTUNE_SHARED=${FCTUNE_SHARED:-/mnt/shared} FCTUNE_NETWORK=${FCTUNE_NETWORK:-/mnt/network}
export HF_HOME=${HF_HOME:-$FCTUNE_SHARED/huggingface}

# What training is told, once all nodes are found fit: trains, output_dir, log, arguments.
launch=$(mktemp)
trap 'rm -f "$launch"' EXIT
TORCH_CPP_LOG_LEVEL=FATAL python -m fctune.cli preflight --config "$config" --gpus "$gpus" \
  --nodes "$nodes" --node-rank "$node" --address "$head" --port "$port" --launch "$launch" "$@" || exit
trains='' output_dir='' log='' arguments=()
# shellcheck source=/dev/null
. "$launch"
case $trains in
  adapter) recipe=recipes/lora_fc_distributed ;;
  all) recipe=recipes/full_fc_distributed ;;
  *) echo "$0: the preflight did not say what trains" >&2; exit 1 ;;
esac
# Not before the preflight: torch makes these folders, and a disk that is not there would seem to be.
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$FCTUNE_NETWORK/cache/inductor}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$FCTUNE_NETWORK/cache/triton}

# What is shown is kept beside the runs, too; tee outlives the signals that ask a run to stop.
exec > >(trap '' USR1 TERM INT; exec tee -a "$log") 2>&1

# Slurm signals every process of a job, and torchrun hands on what it hears: a worker would hear twice, which to it means
# to leave without saving. So torchrun is deaf to requests, workers hear what they are sent, and who signals this script
# alone is heard by the stop file. Nor does torchrun then cut a save short: it kills workers 30 s after a signal.
requests=0
trap 'requests=$((requests + 1))' USR1 TERM INT
(
  trap '' USR1 TERM INT
  # With an endpoint, or `tune run` would start a group of this node alone; static, or the head need not be rank 0.
  exec tune run --nnodes "$nodes" --nproc_per_node "$ranks" --rdzv_backend static --rdzv_endpoint "$head:$port" \
    --node_rank "$node" --rdzv_conf timeout=120 --signals-to-handle SIGHUP,SIGQUIT \
    "$recipe" --config "$config" "${arguments[@]}"
) &
torchrun=$!

heard=0 ended=0
while kill -0 "$torchrun" 2>/dev/null; do
  if [ "$requests" = 0 ]; then
    wait "$torchrun"; ended=$?
  elif [ "$requests" -gt 1 ] && [ "$heard" = 1 ]; then
    kill -HUP "$torchrun" 2>/dev/null  # asked again: leave at once
    wait "$torchrun"; ended=$?
  else
    heard=1
    sleep 2  # for signals that the workers were sent, too
    [ ! -f "$output_dir/run.json" ] || touch "$output_dir/stop"
  fi
done
wait "$torchrun" 2>/dev/null; last=$?  # it may have ended while a trap ran; 127: its code has been had
[ "$last" = 127 ] || ended=$last

# torchrun turns every worker's code into 1; the head's rank 0 says why the run ended, on a disk that may be slow to tell.
[ "$ended" = 0 ] && exit 0
for _ in {1..5}; do
  [ -f "$output_dir/exit.json" ] && break
  sleep 1
done
code=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["code"])' "$output_dir/exit.json" 2>/dev/null)
[ "${code:-0}" != 0 ] || code=1
exit "$code"
