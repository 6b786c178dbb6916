"""Cluster acceptance: measure GPUs, links, disks and training steps, compare with thresholds, name what is at fault."""
