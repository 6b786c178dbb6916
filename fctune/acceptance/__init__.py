"""Whether GPUs, links and disks are fit to train on, and which one is not."""
