#!/usr/bin/env bash
# Run one node's part of a reinforcement run: the last node serves the policy, the others train; a single node does both.
#
#   CONFIG=configs/llama3_1_8b_grpo.yaml MODEL=/mnt/shared/model CASES=/mnt/shared/cases.jsonl sky/grpo_node.sh [key=value ...]
#
# sky/grpo.yaml lists the variables; nodes are read from SkyPilot's or Slurm's. Exit codes are those of sky/run_node.sh: 76 also if the server is lost
# while the training runs, and 1 if it does not start.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
[ ! -x .venv/bin/tune ] || PATH=$PWD/.venv/bin:$PATH
export PYTHONSAFEPATH=1 # no file of this folder is imported instead of a package

nodes=${SKYPILOT_NUM_NODES:-${SLURM_NNODES:-1}} node=${SKYPILOT_NODE_RANK:-${SLURM_NODEID:-0}}
gpus=${SKYPILOT_NUM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-0}}
ips=${SKYPILOT_NODE_IPS:-}
[ -n "$ips" ] || [ -z "${SLURM_JOB_NODELIST:-}" ] || ips=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
ips=${ips:-127.0.0.1}
launch_id=${SKYPILOT_TASK_ID:-${SLURM_JOB_ID:+slurm-$SLURM_JOB_ID}}
# Slurm asks every process of the job to stop, by USR1 before the time limit. The training asks for itself, and a second
# request would end it without saving; the server goes on until it has saved.
by_slurm=''
[ -z "${SLURM_JOB_ID:-}" ] || [ -n "${SKYPILOT_TASK_ID:-}" ] || by_slurm=1
: "${MODEL:?$0: MODEL is empty; name the base that is trained and served}"
: "${CASES:?$0: CASES is empty; name what is asked, as grpo.cases}"
port=${SERVER_PORT:-8000}
# Written by the first node when it starts to train, and with its exit code at the end, so that the server's node can
# end as well; and by the server's node if its server has ended. Those of an earlier start are older than the mark that
# each node leaves at its own start.
done_file=${FCTUNE_SHARED:-/mnt/shared}/grpo/${launch_id:-local}.done
started_file=${done_file%.done}.started
lost_file=${done_file%.done}.lost

if [ "$nodes" -gt 1 ]; then
  server_gpus=$gpus training_nodes=$((nodes - 1)) host=$(tail -n1 <<< "$ips")
  serves=$((node == nodes - 1)) trains=$((node < nodes - 1)) first_gpu=0
else
  server_gpus=${SERVER_GPUS:-$((gpus / 2))} training_nodes=1 host=127.0.0.1 serves=1 trains=1
  first_gpu=$((gpus - server_gpus)) gpus=$((gpus - server_gpus))
  if [ "$gpus" -lt 1 ] || [ "$server_gpus" -lt 1 ]; then
    echo "$0: one node needs 2 GPUs or more, one of them to serve" >&2
    exit 2
  fi
fi
if ! mkdir -p "${done_file%/*}" || ! touch "$done_file.$node"; then
  echo "$0: ${done_file%/*} cannot be written" >&2
  exit 2
fi

# A server on each GPU, or on as many as the model needs: replicas answer more than one server split over all GPUs.
gpus_per_server=${GPUS_PER_SERVER:-1}
if [ $((server_gpus % gpus_per_server)) != 0 ]; then
  echo "$0: GPUS_PER_SERVER=$gpus_per_server does not divide the $server_gpus GPUs that serve" >&2
  exit 2
fi
urls='' servers=()
for ((index = 0; index < server_gpus / gpus_per_server; index++)); do
  urls+=${urls:+,}http://$host:$((port + index))
  [ "$serves" = 1 ] || continue
  first=$((first_gpu + index * gpus_per_server))
  options=''
  [ "$gpus_per_server" = 1 ] || options="--tensor-parallel-size $gpus_per_server"
  # Whoever reaches the server can load adapters: other machines must not where none needs it, nor those without the key.
  [ "$nodes" -gt 1 ] || options="--host 127.0.0.1 $options"
  unset VLLM_API_KEY # of servers for users: the trainer sends FCTUNE_API_KEY, if that is set
  [ -z "${FCTUNE_API_KEY:-}" ] || export VLLM_API_KEY=$FCTUNE_API_KEY
  (
    trap '' USR1
    CUDA_VISIBLE_DEVICES=$(seq -s, "$first" $((first + gpus_per_server - 1))) exec python -m fctune.cli serve "$MODEL" \
      --adapters "${ADAPTER_RANK:-32}" --name policy --python .vllm/bin/python --port $((port + index)) \
      --vllm="$options ${VLLM:-}"
  ) &
  servers+=($!)
done
stand_in=''
trap '[ -z "$stand_in" ] || kill -KILL "$stand_in" 2> /dev/null; [ ${#servers[@]} = 0 ] || { kill -TERM "${servers[@]}" 2> /dev/null; wait "${servers[@]}" 2> /dev/null; }' EXIT

is_server_lost() {
  local each
  for each in "${servers[@]}"; do kill -0 "$each" 2> /dev/null || return 0; done
  [ "$serves" = 0 ] && [ "$lost_file" -nt "$done_file.$node" ]
}

if [ "$trains" = 0 ]; then
  if [ -z "$by_slurm" ]; then
    sky/preempt.sh --on-signal sky.skylet.skylet > /dev/null 2>&1 &
    stand_in=$!
  fi
  is_stopped='' lost_s=''
  trap 'is_stopped=1' TERM
  trap '' USR1 # the training ends, and with it this node
  while [ ! "$done_file" -nt "$done_file.$node" ]; do
    if [ -z "$lost_s" ] && { [ -n "$is_stopped" ] || is_server_lost; }; then
      lost_s=0
      touch "$lost_file" # the training saves and ends
      [ -n "$is_stopped" ] || echo "$0: the server has ended; its output is above" >&2
      [ "$started_file" -nt "$done_file.$node" ] || exit 1
    fi
    # SkyPilot stops all nodes when one has failed, so this one waits until the others have saved, but not forever.
    if [ -n "$lost_s" ]; then
      [ "$lost_s" -lt 600 ] || exit 76
      lost_s=$((lost_s + 5))
    fi
    sleep 5 > /dev/null 2>&1 & wait "$!"
  done
  [ -n "$lost_s" ] || exit 0
  # With a code of its own, this node would restart a training that has failed for good.
  read -r code < "$done_file"
  exit "${code:-76}"
fi

are_ready() {
  local url
  for url in ${urls//,/ }; do curl --noproxy '*' --silent --fail --output /dev/null --max-time 5 "$url/health" || return 1; done
}
# The servers load their model while the preflight and the imports run; training is not started before all answer.
for ((waited = 0; ; waited += 5)); do
  if are_ready; then break; fi
  if is_server_lost; then
    echo "$0: the server has ended before it was ready; see its output" >&2
    exit 1
  fi
  [ "$waited" -lt "${SERVER_START_S:-1800}" ] || { echo "$0: no server at ${urls//http:\/\//} after $waited s" >&2; exit 1; }
  sleep 5
done

[ "$node" != 0 ] || touch "$started_file"
visible=$(seq -s, 0 $((gpus - 1)))
[ "$nodes" -gt 1 ] || export CUDA_VISIBLE_DEVICES=$visible
training_ips=$(head -n "$training_nodes" <<< "$ips")
SKYPILOT_NUM_NODES=$training_nodes SKYPILOT_NODE_IPS=$training_ips SKYPILOT_NUM_GPUS_PER_NODE=$gpus \
  sky/run_node.sh "grpo.cases=$CASES" grpo.engine=server "grpo.server.url=$urls" \
  "grpo.server.served_model=policy" "$@" &
training=$!
# Training waits for a lost server, up to grpo.server.max_wait_s. This one does not come back.
(
  trap 'exit 1' TERM
  until is_server_lost; do sleep 5 > /dev/null 2>&1 & wait $!; done
  echo "$0: the server has ended, see its output; the training saves and ends" >&2
  kill -TERM "$training"
) &
watcher=$!
# A stop request reaches the training, which saves and exits; the server ends with it.
trap 'kill -TERM "$watcher" 2> /dev/null; [ -n "$by_slurm" ] || kill -TERM "$training" 2> /dev/null' TERM INT USR1
wait "$training"; code=$?
while kill -0 "$training" 2> /dev/null; do wait "$training"; code=$?; done
kill -TERM "$watcher" 2> /dev/null
# The training has saved because it lost its server: another start may keep it.
wait "$watcher" 2> /dev/null && [ "$code" = 75 ] && code=76
[ "$node" != 0 ] || { echo "$code" > "$done_file.part" && mv "$done_file.part" "$done_file"; }
exit "$code"
