#!/usr/bin/env bash
# One machine of the cluster: the first process of new namespaces, which sets the host name, users, mounts and daemons.
# All of its processes end with it.
#
#   unshare --mount --uts --pid --fork --kill-child --mount-proc tests/slurm/machine.sh FOLDER NAME
set -euo pipefail
lab=$1 name=$2

hostname "$name"
for name_in_etc in passwd hosts profile slurm; do mount --bind "$lab/etc/$name_in_etc" "/etc/$name_in_etc"; done

mount -t tmpfs tmpfs /mnt
mkdir /mnt/shared /mnt/network /mnt/.kept
mount --bind "$lab/shared" /mnt/shared
mount --bind "$lab/network-$name" /mnt/network

# Python or the project may be in a folder that only root can enter, such as /root: make just these paths accessible.
# /tmp is the cluster's own, so that the environments which SkyPilot makes there never meet those of a killed cluster.
mapfile -t needed < "$lab/etc/needed"
mapfile -t closed < "$lab/etc/closed"
for i in "${!needed[@]}"; do
  mkdir "/mnt/.kept/$i"
  mount --bind "${needed[$i]}" "/mnt/.kept/$i"
done
for folder in "${closed[@]}"; do mount -t tmpfs -o mode=755 tmpfs "$folder"; done
mount --bind "$lab/tmp" /tmp
for i in "${!needed[@]}"; do
  mkdir -p "${needed[$i]}"
  mount --bind "/mnt/.kept/$i" "${needed[$i]}"
done

if [ "$name" = desk ]; then
  sleep infinity &
elif [ "$name" = login ]; then
  mkdir -p /run/sshd
  munged --foreground --force --socket="$lab/run/munge.socket" --key-file="$lab/etc/munge.key" \
    --log-file="$lab/log/munged.log" --pid-file="$lab/run/munged.pid" --seed-file="$lab/run/munged.seed" &
  until [ -S "$lab/run/munge.socket" ]; do sleep 0.1; done
  slurmctld -D &
  /usr/sbin/sshd -D -e -f "$lab/etc/sshd_config" &
else
  slurmd -D -N "$name" &
fi
wait -n
