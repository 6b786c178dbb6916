# Sourced by the sbatch files of this folder: what both do around srun. Not run by itself.
# shellcheck shell=bash

export CONFIG=${CONFIG:-configs/llama3_1_8b_lora.yaml}
export FCTUNE_SHARED=${FCTUNE_SHARED:-$HOME/fctune} FCTUNE_NETWORK=${FCTUNE_NETWORK:-/tmp/fctune-$SLURM_JOB_ID}
mkdir -p "$FCTUNE_SHARED"
srun --ntasks-per-node=1 mkdir -p "$FCTUNE_NETWORK" || exit
started=$(date +%s)
asked=''

# Slurm asks this script alone (B: in --signal), 300 s before it takes the nodes; scancel asks every process of the
# steps. A job that is cancelled or preempted (TERM) has had that from Slurm itself.
trap 'asked=USR1; echo "$(date -Is) asked to stop: the run saves, and the job goes back into the queue" >&2; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
trap 'asked=TERM' TERM

# Run a command on all nodes to its end, which a signal to this script does not cut short; then say how it went, and go
# back into the queue where the run was stopped and has saved: the same job goes on with it.
run_and_report() {
  local code=0 last now elapsed
  # A node that has ended gives the others two minutes. With --kill-on-bad-exit they would be killed at once, and the
  # job would end with the code of the kill, which is higher, in place of the run's.
  srun --kill-on-bad-exit=0 --wait=120 --gpu-bind=none "$@" &
  while kill -0 "$!" 2> /dev/null; do
    wait "$!"
    code=$?
  done
  wait "$!" 2> /dev/null # it may have ended while a trap ran; 127: its code has been had
  last=$?
  [ "$last" = 127 ] || code=$last
  [ "$code" -le 128 ] || code=1 # a node was killed: srun gives the highest code of all
  now=$(date +%s)
  elapsed=$((now - started))
  {
    echo "job        $SLURM_JOB_ID (restart ${SLURM_RESTART_COUNT:-0}) on $SLURM_JOB_NUM_NODES nodes, $SLURM_JOB_NODELIST"
    echo "config     $CONFIG"
    echo "started    $(date -Is -d "@$started")"
    echo "ended      $(date -Is -d "@$now"), after $((elapsed / 3600)) h $((elapsed % 3600 / 60)) min"
    echo "exit code  $code${asked:+, asked to stop by $asked}"
    echo "last said  $(grep -v '^ *$' "train_$SLURM_JOB_ID.log" 2> /dev/null | tail -n 1)"
  } > "train_${SLURM_JOB_ID}_summary.txt"
  if [ "$code" = 75 ] && [ "$asked" != TERM ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "${MAX_REQUEUES:-20}" ]; then
    scontrol requeue "$SLURM_JOB_ID"
  fi
  return "$code"
}
