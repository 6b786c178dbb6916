#!/usr/bin/env bash
# Install missing Debian packages as root, without starting their daemons. Without root or apt, print a message.
#
#   tests/slurm/packages.sh NAME...
set -euo pipefail

missing=()
for name; do
  dpkg-query --show --showformat '${Status}' "$name" 2> /dev/null | grep -q 'ok installed' || missing+=("$name")
done
[ ${#missing[@]} != 0 ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
  echo "$0: cannot install ${missing[*]} without root and apt-get; the tests that need them are skipped" >&2
  exit 0
fi

# Debian starts a daemon as soon as it is installed, listening on all addresses, unless this policy forbids it.
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
