#!/usr/bin/env bash
# Run one node's part of a training run: the preflight, then torchrun, which is started only here.
#
#   CONFIG=configs/llama3_1_8b_lora.yaml sky/run_node.sh [key=value ...]     # or MODEL_SIZE=8B
#
# The nodes are read from SkyPilot's variables, or from Slurm's (one task per node). Without either, set these on each
# node; only NODE_RANK differs:
#
#   NUM_NODES=2 NODE_RANK=0 MASTER_ADDR=node-0 CONFIG=... sky/run_node.sh
#
# .env.example describes CONFIG and the other variables. fctune/base/exit_codes.py lists the exit codes and those after
# which a launcher repeats this command: 75, stopped on request and saved, and 76, a GPU, a node or the network failed.
# It does so without a limit of its own, so after MAX_RESTARTS (3) restarts in a row that have saved no new checkpoint,
# this script ends with 1 instead.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
[ ! -x .venv/bin/tune ] || PATH=$PWD/.venv/bin:$PATH
export PYTHONSAFEPATH=1 # no file of this folder is imported instead of a package

config=${CONFIG:-${MODEL_SIZE:-}}
: "${config:?usage: CONFIG=configs/llama3_1_8b_lora.yaml $0 [key=value ...], or MODEL_SIZE=8B}"
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
gpus=${SKYPILOT_NUM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-${GPUS_PER_NODE:-$(nvidia-smi -L 2>/dev/null | wc -l)}}}
[ -z "${FCTUNE_CPU_RANKS:-}" ] || gpus=0
ranks=${FCTUNE_CPU_RANKS:-$gpus}

# Several tasks would meet on one port, and each would start a process for every GPU of the node.
if [ "${SLURM_STEP_NUM_TASKS:-1}" -gt "${SLURM_STEP_NUM_NODES:-1}" ] && [ -z "${SLURM_PTY_PORT:-}" ]; then
  [ "${SLURM_PROCID:-0}" != 0 ] || echo "$0: srun started this script in $SLURM_STEP_NUM_TASKS tasks on" \
    "$SLURM_STEP_NUM_NODES nodes, but it starts one process for each GPU by itself. Start one task per node: sbatch" \
    "--nodes=$SLURM_STEP_NUM_NODES sky/slurm/finetune_venv.sbatch, or srun --nodes=$SLURM_STEP_NUM_NODES" \
    "--ntasks=$SLURM_STEP_NUM_NODES --gpus-per-node=8 --cpus-per-task=100 sky/run_node.sh." >&2
  exit 2
fi

export FCTUNE_SHARED=${FCTUNE_SHARED:-/mnt/shared} FCTUNE_NETWORK=${FCTUNE_NETWORK:-/mnt/network}
export HF_HOME=${HF_HOME:-$FCTUNE_SHARED/huggingface} FCTUNE_CACHE=${FCTUNE_CACHE:-$FCTUNE_SHARED/cache}
# A single node's own disk takes the last state if the shared one is full. Of several nodes, each would see its own only,
# and Kubernetes and Slurm delete the disk, or what is in /tmp, with the pod or the job.
own_fallback=''
if [ "$nodes" = 1 ] && [ -z "${FCTUNE_FALLBACK:-}${KUBERNETES_SERVICE_HOST:-}${SLURM_JOB_ID:-}" ]; then
  export FCTUNE_FALLBACK=$FCTUNE_NETWORK/fallback
  own_fallback=1
fi

# Newest checkpoint's step when this run's last start in this launch ended, and how many in a row have not moved it. All
# nodes read it before they meet in the preflight, so they end with the same code and write the same at the end: any of
# them may be killed before, since launchers end the others when the first one has ended.
launch_id=${LAUNCH_ID:-${SKYPILOT_TASK_ID:-${SLURM_JOB_ID:+slurm-$SLURM_JOB_ID}}}
launch_file=${launch_id:+$FCTUNE_SHARED/restarts/${launch_id//[^[:alnum:]_.-]/-}}
# An allocation of Slurm may hold several runs, which differ in what names their output_dir; the last one counts.
run_name=${OUTPUT_DIR:-$config}
for word in ${OVERRIDES:-} "$@"; do
  [[ "$word" != output_dir=* ]] || run_name=${word#*=}
done
progress=${launch_file:+$launch_file.$(cksum <<< "$run_name" | tr -d ' ')}
last_step=0 fruitless=0
[ ! -s "$progress" ] || read -r last_step fruitless < "$progress"

# The preflight writes the launch here once all nodes are fit: config, recipe, output_dir, log, arguments.
launch=$(mktemp)
imports=$(mktemp -d)
export FCTUNE_RANKS_MET=$launch.met # created by the ranks of this node
trap 'rm -rf "$launch" "$launch.met" "$imports"' EXIT
recipe='' output_dir='' log='' arguments=() faulty_nodes=''

# Exit with a code, which the head, or the first node that gets here, leaves for sky/slurm/batch.sh with the ranks of
# the nodes to blame.
leave() {
  local code=$1 step=$last_step found ended
  if [ -n "$progress" ] && { [ "$code" = 75 ] || [ "$code" = 76 ]; }; then
    for found in "${output_dir:-/none}"/checkpoints/*checkpoint-*/*_SUCCESS; do
      found=${found%/*} found=${found##*-}
      [[ ! "$found" =~ ^[0-9]+$ ]] || [ "$found" -le "$step" ] || step=$found
    done
    [ "$step" -gt "$last_step" ] && fruitless=0 || fruitless=$((fruitless + 1))
    mkdir -p "${progress%/*}" && echo "$step $fruitless" > "$progress.$node" && mv -f "$progress.$node" "$progress"
    if [ "$fruitless" -gt "${MAX_RESTARTS:-3}" ]; then
      echo "$0: $fruitless starts in a row saved no new checkpoint after step $step, so this one (exit code $code) is not restarted" >&2
      code=1
    fi
  fi
  [ "$code" != 0 ] || [ -z "$progress" ] || rm -f "$progress"
  # SkyPilot's srun kills the other nodes when the first one ends, and then all that SkyPilot may see is 143, after which
  # it starts the job again; sky/setup.sh stops that start. The head knows best.
  if [ -n "${SLURM_JOB_ID:-}" ] && [ -n "${SKYPILOT_TASK_ID:-}" ]; then
    case $code in
      1 | 2 | 74) [ "$node" != 0 ] && [ -f "$launch_file.final" ] || { mkdir -p "${launch_file%/*}" && echo "$code" > "$launch_file.final"; } ;;
      0 | 75 | 76) [ "$node" != 0 ] || rm -f "$launch_file.final" ;;
    esac
  fi
  if [ -n "${SLURM_JOB_ID:-}" ] && [ -z "${SKYPILOT_TASK_ID:-}" ] && [ -d "$FCTUNE_SHARED" ]; then
    ended=$FCTUNE_SHARED/restarts/slurm-$SLURM_JOB_ID.ended
    mkdir -p "${ended%/*}"
    [ "$node" != 0 ] && [ -f "$ended" ] || echo "$code $faulty_nodes" > "$ended"
  fi
  exit "$code"
}

[ "$ranks" -gt 0 ] || { echo "$0: no GPU on $(hostname); to run on CPUs, set FCTUNE_CPU_RANKS=N" >&2; leave 1; }

# Before the time limit, Slurm also signals the preflight. The training takes over this signal below.
trap 'leave 75' USR1
TORCH_CPP_LOG_LEVEL=FATAL python -m fctune.cli preflight --config "$config" --gpus "$gpus" \
  --wait "${PREFLIGHT_WAIT_S:-60}" --nodes "$nodes" --node-rank "$node" --address "$head" --port "$port" \
  --launch "$launch" "$@"
code=$?
# shellcheck source=/dev/null
. "$launch"
[ "$code" = 0 ] || leave "$code"
[ -n "$recipe" ] || { echo "$0: the preflight did not name a recipe" >&2; leave 1; }
started=${log%.log}.started # older than what this launch records, by the clock of the shared disk
touch "$started"
# Set only after the preflight: torch creates these folders, which would hide a missing disk.
kernels=$FCTUNE_NETWORK/cache
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$kernels/inductor}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$kernels/triton}

# A preempted run may restart on a node whose disk is empty, so the head keeps compiled kernels with the run, once the
# first step has compiled them and at the end. Keys of the caches include versions, graphs and GPUs.
kept_kernels=$output_dir/compiled_kernels.tar
if [ -f "$kept_kernels" ] && [ ! -d "$kernels/inductor" ]; then
  mkdir -p "$kernels" && tar -xf "$kept_kernels" -C "$kernels" \
    || echo "$0: $kept_kernels cannot be read; blocks are compiled again" >&2
fi
keep_kernels() {
  [ -d "$kernels/inductor" ] && [ -s "$output_dir/metrics.jsonl" ] || return 1
  local folders=(inductor) part=$kept_kernels.$BASHPID # the copier may be killed while it writes
  [ ! -d "$kernels/triton" ] || folders+=(triton)
  tar -cf "$part" -C "$kernels" --ignore-failed-read "${folders[@]}" 2> /dev/null
  # 1: another process has written a file meanwhile.
  [ $? -le 1 ] && mv -f "$part" "$kept_kernels"
}

# Copy the output to a log file on the shared volume and one on this node's disk; tee ignores the signals that request a
# stop.
mirror=$FCTUNE_NETWORK/logs/$(basename "$output_dir")
mkdir -p "$mirror" || echo "$0: $mirror cannot be created; logs are only in ${log%/*}" >&2
exec > >(trap '' USR1 TERM INT; exec tee -a "$log" "$mirror/${log##*/}") 2>&1

# The head also copies the run's metrics and record there, every minute and at the end. It never stops a run.
copy_records() {
  local file
  for file in metrics.jsonl run.json exit.json alerts.jsonl; do
    [ ! -f "$output_dir/$file" ] || cp -p "$output_dir/$file" "$mirror/$file"
  done
} 2> /dev/null
copier='' stand_in=''
if [ "$node" = 0 ] && [ -d "$mirror" ]; then
  # The pipe is never written to, so `read` waits without a process that would outlive this one.
  (
    trap '' USR1 TERM INT
    is_kept=''
    while :; do
      read -rt 60 <> <(:)
      copy_records
      [ -n "$is_kept" ] || ! keep_kernels || is_kept=1
    done
  ) > /dev/null 2>&1 &
  copier=$!
fi
finish_mirror() {
  [ -z "$stand_in" ] || kill -KILL "$stand_in" 2> /dev/null
  [ -n "$copier" ] || return 0
  kill -KILL "$copier" 2> /dev/null
  wait "$copier" 2> /dev/null # otherwise bash reports the kill in the log, as its last line
  rm -f "$kept_kernels.$copier"
  copy_records
  keep_kernels
  if [ -n "${MIRROR_CHECKPOINTS:-}" ]; then
    cp -a "$output_dir/checkpoints" "$output_dir/export" "$mirror/" || echo "$0: checkpoints were not copied to $mirror" >&2
  fi
}

# Slurm signals every process of a job, and torchrun forwards the signals that it receives, so a worker would get two,
# which makes it exit without saving. Therefore torchrun ignores stop requests: workers receive the signals sent to them
# directly, and a signal to this script alone creates the stop file. This also keeps torchrun from interrupting a save,
# since it kills workers 30 s after a signal.
# Ranks join only those of the same ID, so what is left of an earlier job on this port stays out.
run_id=${SKYPILOT_TASK_ID:-${SLURM_JOB_ID:+slurm-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}}}
# The prefix matters: an ID that starts with a dash would be read as an option.
run_id=${run_id:-run$output_dir}
run_id=${run_id//[^[:alnum:]_.-]/-}

# SkyPilot runs the hook for preemption only on the head; any pod may be the one that is stopped.
if [ "$node" != 0 ] && [ -n "${SKYPILOT_NODE_RANK:-}" ] && [ -z "${SLURM_JOB_ID:-}" ] && ! pgrep -f 'sky\.skylet\.skylet' > /dev/null; then
  sky/preempt.sh --on-signal sky.skylet.skylet > /dev/null 2>&1 &
  stand_in=$!
fi

# The only modules of this folder that ranks import, also with an image that has recipes of its own.
ln -s "$PWD/recipes" "$imports/recipes"
export PYTHONPATH=$imports${PYTHONPATH:+:$PYTHONPATH}

# Processes of this container, or of this node's part of a Slurm job, that the kernel has killed for lack of memory.
count_memory_kills() {
  awk '$1 == "oom_kill" { print $2 }' "/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup)/memory.events" 2> /dev/null
}
memory_kills=$(count_memory_kills)

requests=0
trap 'requests=$((requests + 1))' USR1 TERM INT
(
  trap '' USR1 TERM INT
  # Without an endpoint, `tune run` starts a group of this node only; only the static backend puts rank 0 on the head.
  exec tune run --nnodes "$nodes" --nproc_per_node "$ranks" --rdzv_backend static --rdzv_endpoint "$head:$port" \
    --rdzv_id "$run_id" --node_rank "$node" --rdzv_conf timeout=120 --signals-to-handle SIGHUP,SIGQUIT \
    "recipes/$recipe" --config "$config" "${arguments[@]}"
) &
torchrun=$!

is_forwarded=0 ended=0
while kill -0 "$torchrun" 2>/dev/null; do
  if [ "$requests" = 0 ]; then
    wait "$torchrun"; ended=$?
  elif [ "$requests" -gt 1 ] && [ "$is_forwarded" = 1 ]; then
    kill -HUP "$torchrun" 2>/dev/null  # second request: exit at once
    wait "$torchrun"; ended=$?
  else
    is_forwarded=1
    sleep 2  # workers that were signaled too react first
    [ ! -f "$output_dir/run.json" ] || touch "$output_dir/stop"
  fi
done
wait "$torchrun" 2>/dev/null; last=$?  # torchrun may have ended during a trap; 127: already waited for
[ "$last" = 127 ] || ended=$last

# Ranks that were all killed left no record, and those of other nodes only the record of what followed.
has_memory=1
if [ "$ended" != 0 ] && [ "$(count_memory_kills)" != "$memory_kills" ] && [ "$output_dir/.lock" -nt "$started" ]; then
  has_memory=''
  echo "$0: node $node is out of memory: the kernel has killed processes (dmesg)" >&2
  timeout 10 python -c '
import sys
from fctune.runs.directory import RunDirectory
directory = RunDirectory(sys.argv[1])
directory.has_begun = True
known = directory.read_exit() or {}
reason = f"node {sys.argv[2]} is out of memory: the kernel has killed processes"
directory.finish(1, reason, known.get("step", 0), known.get("checkpoint"), is_crash=True, is_out_of_memory=True)
' "$output_dir" "$node"
fi

# torchrun replaces every worker's exit code with 1. A rank writes the real one to exit.json, which may appear late on
# other nodes, and replaces another rank's record of what followed from it. A launch that has left the run before as it
# was writes not_started.json instead.
if [ "$ended" = 0 ]; then
  finish_mirror
  [ -n "$own_fallback" ] || leave 0
  # Nobody chose that disk, and it may be deleted with the machine, so this is not the end that was asked for.
  found=$(find "$output_dir/export" -mindepth 1 -maxdepth 1 -type l 2> /dev/null
    find "$FCTUNE_FALLBACK/$(basename "$(readlink -f "$output_dir")")/export" -mindepth 1 -maxdepth 1 -newer "$launch" 2> /dev/null)
  [ -n "$found" ] || leave 0
  echo "$0: ${output_dir} has no room, so the export is only on this machine's disk, which may be deleted with it; copy" \
    "it to another disk: $(xargs -rd '\n' readlink -f <<< "$found" | sort -u | tr '\n' ' ')" >&2
  leave 74
fi
code='' is_final=''
for _ in {1..5}; do
  for record in "$output_dir/exit.json" "$output_dir/not_started.json"; do
    [ ! "$record" -nt "$started" ] || read -r code is_final faulty_nodes < <(timeout 10 python -c '
import json, sys
end = json.load(open(sys.argv[1]))
print(end["code"], not end.get("is_consequence", False), end.get("faulty_node", {}).get("rank", ""))' "$record" 2> /dev/null)
  done
  [ "$is_final" != True ] || break
  sleep 1
done
# All ranks ended without a word after they had locked the run, so they were killed by a driver, NCCL or the kernel: an
# error in Python would have left a record.
if [ -z "$code" ] && [ "$requests" = 0 ] && [ "$output_dir/.lock" -nt "$started" ]; then
  code=${has_memory:+76}
  [ "$nodes" -gt 1 ] || faulty_nodes=0
fi
# A node was lost after the preflight, and before there was a run to record it in, unless torchrun could not start the
# recipe or be started: with such a mistake, every start ends like this one.
starts_recipe() {
  [ "$ended" != 2 ] && [ "$ended" != 126 ] && [ "$ended" != 127 ] || return
  [ ! -f "recipes/$recipe.py" ] || timeout 120 python -c "import runpy; runpy.run_path('recipes/$recipe.py')" > /dev/null 2>&1
  [ $? != 1 ]
}
if [ -z "$code" ] && [ "$requests" = 0 ] && [ "$nodes" -gt 1 ] && [ ! -e "$launch.met" ] && starts_recipe; then
  code=${has_memory:+76}
fi
[ "${code:-0}" != 0 ] || code=1
finish_mirror
# Stopped for good, as fctune sweep stops the worst runs: with another code, the job would be restarted.
[ "$code" != 75 ] || [ ! -f "$output_dir/stop-for-good" ] || leave 0
leave "$code"
