#!/usr/bin/env bash
# Ask the training on this node to save and stop, and wait until it has. SkyPilot's hook for preemption runs this on the
# head. On the other nodes, where SkyPilot runs no hooks, sky/run_node.sh starts it with the name of SkyPilot's daemon,
# which a pod's preStop signals and waits for.
#
#   sky/preempt.sh [--on-signal sky.skylet.skylet]
set -uo pipefail
if [ "${1:-}" = --on-signal ]; then
  is_signaled=0
  trap 'is_signaled=1' TERM
  while [ "$is_signaled" = 0 ]; do
    sleep 600 > /dev/null 2>&1 &
    wait "$!"
    kill "$!" 2> /dev/null
  done
fi
# Only the outer script: it passes the request on, and a second one would end the run without saving.
scripts=$(pgrep -f '(^|[ /])sky/grpo_node.sh( |$)' || pgrep -f '(^|[ /])sky/run_node.sh( |$)') || {
  echo "$0: no training runs on $(hostname)"
  exit 0
}
echo "$0: the training on $(hostname) saves and stops"
# shellcheck disable=SC2086
kill -TERM $scripts 2> /dev/null
for script in $scripts; do
  # One that has ended may stay as a zombie until its parent notices.
  while grep -qs '^State:[[:space:]]*[^Z[:space:]]' "/proc/$script/status"; do sleep 1; done
done
echo "$0: the training has ended"
