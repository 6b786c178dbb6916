#!/usr/bin/env bash
# Install the Debian packages that are missing, as root; nothing that they bring is started. Without root or apt, say so.
#
#   tests/slurm/packages.sh NAME...
set -euo pipefail

missing=()
for name; do
  dpkg-query --show --showformat '${Status}' "$name" 2> /dev/null | grep -q 'ok installed' || missing+=("$name")
done
[ ${#missing[@]} != 0 ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
  echo "$0: not installed, as that takes root and apt-get: ${missing[*]}; the tests that need them are skipped" >&2
  exit 0
fi

# Debian starts a daemon as soon as it is installed, listening everywhere, unless this says no.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
  printf '#!/bin/sh\nexit 101\n' > $policy
  chmod +x $policy
  trap 'rm -f $policy' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
if ! { timeout 120 apt-get update --quiet --quiet \
  && timeout 300 apt-get install --quiet --quiet --yes --no-install-recommends "${missing[@]}" > /dev/null; }; then
  echo "$0: apt-get could not install ${missing[*]}; the tests that need them are skipped" >&2
fi
