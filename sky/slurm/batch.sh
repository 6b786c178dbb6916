# Sourced by the sbatch scripts of this folder: their common code around srun. Not to be run directly.
# shellcheck shell=bash

[ -z "${FCTUNE_SWEEP:-}" ] || printf -v CONFIG '%s/configs/%03d.yaml' "$FCTUNE_SWEEP" "$SLURM_ARRAY_TASK_ID"
[ -n "${CONFIG:-}${MODEL_SIZE:-}" ] || CONFIG=configs/llama3_1_8b_lora.yaml
export CONFIG=${CONFIG:-}
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

mkdir -p "$FCTUNE_SHARED"
srun --ntasks-per-node=1 mkdir -p "$FCTUNE_NETWORK" || exit
started=$(date +%s)
stop_signal=''

# 300 s before the time limit, Slurm signals only this script (B: in --signal), which signals every process of the job's
# steps. When a job is cancelled or preempted (TERM), Slurm signals those processes itself.
trap 'stop_signal=USR1; echo "$(date -Is) stop requested: the run saves a checkpoint, and the job is requeued" >&2; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
trap 'stop_signal=TERM' TERM

# Run a command on all nodes until it ends, even if this script is signaled; then write a summary, and requeue the job
# if the run was stopped and has saved, so that the same job resumes it.
run_and_report() {
  local code=0 last now elapsed
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
  [ "$code" -le 128 ] || code=1 # a node was killed: srun returns the highest exit code of all nodes
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
  if [ "$code" = 75 ] && [ "$stop_signal" != TERM ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "${MAX_REQUEUES:-20}" ]; then
    scontrol requeue "$SLURM_JOB_ID"
  fi
  return "$code"
}
