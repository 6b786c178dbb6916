# Sourced by the sbatch scripts of this folder: their common code around srun. Not to be run directly.
# shellcheck shell=bash

if [ "${SLURM_NTASKS:-1}" -gt "${SLURM_JOB_NUM_NODES:-1}" ]; then
  echo "$SLURM_NTASKS tasks on $SLURM_JOB_NUM_NODES nodes, but each node's task starts a process for each of its GPUs." \
    "Leave out --ntasks and --ntasks-per-node." >&2
  exit 2
fi

[ -z "${FCTUNE_SWEEP:-}" ] || printf -v CONFIG '%s/configs/%03d.yaml' "$FCTUNE_SWEEP" "$SLURM_ARRAY_TASK_ID"
[ -n "${CONFIG:-}${MODEL_SIZE:-}" ] || CONFIG=configs/llama3_1_8b_lora.yaml
export CONFIG=${CONFIG:-}
# srun does not inherit it from Slurm 22.05 on; a task would be bound to one core where the site binds tasks to cores.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=${SRUN_CPUS_PER_TASK:-$SLURM_CPUS_PER_TASK}
export EXPECT_INFINIBAND=${EXPECT_INFINIBAND:-1} # nodes that would communicate over TCP are a fault
export FCTUNE_SHARED=${FCTUNE_SHARED:-$HOME/fctune} FCTUNE_NETWORK=${FCTUNE_NETWORK:-/tmp/fctune-$SLURM_JOB_ID}

# Load the modules of FCTUNE_MODULES, which srun passes on to all nodes. Their functions may use unset variables.
if [ -n "${FCTUNE_MODULES:-}" ]; then
  set +u
  for file in "$MODULESHOME/init/bash" "$LMOD_PKG/init/bash" /etc/profile.d/modules.sh /etc/profile.d/lmod.sh; do
    # shellcheck source=/dev/null
    command -v module > /dev/null || [ ! -f "$file" ] || . "$file"
  done
  if ! command -v module > /dev/null; then
    echo "FCTUNE_MODULES=$FCTUNE_MODULES: this node has no module command. Leave the variable empty, or set" \
      "MODULESHOME to the folder that has init/bash." >&2
    exit 2
  fi
  for name in $FCTUNE_MODULES; do
    module load "$name" || {
      echo "FCTUNE_MODULES=$FCTUNE_MODULES: module load $name failed on $(hostname). Choose one that module avail lists." >&2
      exit 2
    }
  done
  set -u
fi

# What commands call this job. The last task of an array to start has the array's own number as SLURM_JOB_ID, which alone
# means all its tasks.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}

mkdir -p "$FCTUNE_SHARED"
srun --ntasks-per-node=1 mkdir -p "$FCTUNE_NETWORK" || exit
started=$(date +%s)
stop_signal=''

# 300 s before the time limit, Slurm signals only this script (B: in --signal), which signals every process of the job's
# steps. When a job is cancelled or preempted (TERM), Slurm signals those processes itself.
trap 'stop_signal=USR1; echo "$(date -Is) stop requested: the run saves a checkpoint, and the job is requeued" >&2; scancel --signal=USR1 "$job"' USR1
trap 'stop_signal=TERM' TERM

# Requeue this job, so that it resumes the run, without the nodes of the given ranks as long as the partition has enough
# others.
requeue() {
  local faulty='' excluded rank left
  trap '' TERM # a requeued job's processes are signaled, and scontrol is one of them
  for rank in "$@"; do
    faulty+=${faulty:+,}$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n "$((rank + 1))p")
  done
  scontrol requeue "$job" || return
  [ -n "$faulty" ] || return 0
  excluded=$(scontrol show job "$job" | sed -n 's/.*ExcNodeList=\([^ ]*\).*/\1/p')
  [ -z "$excluded" ] || [ "$excluded" = '(null)' ] || faulty=$excluded,$faulty
  # Without the nodes that start no jobs; * marks one that does not respond, and $ one in maintenance.
  left=$(sinfo --noheader --Node --partition "${SLURM_JOB_PARTITION:-}" --format '%N %T' \
    | awk '$2 !~ /^(down|drain|fail|maint|reserved|unknown)|[*$]/ { print $1 }' | sort -u \
    | grep -cvxF "$(scontrol show hostnames "$faulty")")
  if [ "$left" -lt "$SLURM_JOB_NUM_NODES" ]; then
    echo "$(date -Is) $faulty failed, but is not excluded: the partition has only $left other nodes that start jobs" >&2
  else # only a pending job's list can be changed
    echo "$(date -Is) $faulty failed: the job continues on other nodes" >&2
    scontrol update "JobId=$job" "ExcNodeList=$faulty"
  fi
}

# Run a command on all nodes until it ends, even if this script is signaled; then write a summary, and requeue the job
# after the exit codes that fctune/base/exit_codes.py restarts; sky/run_node.sh limits how often.
run_and_report() {
  local code=0 last now elapsed runs_code='' faulty_nodes='' ended=$FCTUNE_SHARED/restarts/slurm-$SLURM_JOB_ID.ended
  rm -f "$ended"
  # After one node exits, the others have two minutes. With --kill-on-bad-exit they would be killed at once, and the job
  # would end with the exit code of the kill, which is higher, instead of the run's.
  srun --kill-on-bad-exit=0 --wait=120 --gpu-bind=none "$@" &
  while kill -0 "$!" 2> /dev/null; do
    wait "$!"
    code=$?
  done
  wait "$!" 2> /dev/null # srun may have ended during a trap; 127: already waited for
  last=$?
  [ "$last" = 127 ] || code=$last
  # srun returns the highest exit code of all nodes, and that of a kill if it has ended one that does not answer, such
  # as a head that waits for a lost node. sky/run_node.sh leaves the run's own.
  [ ! -s "$ended" ] || read -r runs_code faulty_nodes < "$ended"
  rm -f "$ended"
  [ "${runs_code:-0}" = 0 ] || code=$runs_code
  [ "$code" -le 128 ] || code=1
  now=$(date +%s)
  elapsed=$((now - started))
  {
    echo "job        $SLURM_JOB_ID (restart ${SLURM_RESTART_COUNT:-0}) on $SLURM_JOB_NUM_NODES nodes, $SLURM_JOB_NODELIST"
    echo "config     ${CONFIG:-of MODEL_SIZE=$MODEL_SIZE}"
    echo "started    $(date -Is -d "@$started")"
    echo "ended      $(date -Is -d "@$now"), after $((elapsed / 3600)) h $((elapsed % 3600 / 60)) min"
    echo "exit code  $code${stop_signal:+, stop requested by $stop_signal}"
    echo "last line  $(grep -v '^ *$' "train_$SLURM_JOB_ID.log" 2> /dev/null | tail -n 1)"
  } > "train_${SLURM_JOB_ID}_summary.txt"
  case $code in
    75 | 76)
      # shellcheck disable=SC2086
      [ "$stop_signal" = TERM ] || requeue $faulty_nodes
      ;;
  esac
  return "$code"
}
