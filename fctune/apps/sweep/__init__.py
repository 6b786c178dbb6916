"""Sweeps: many runs of one config with different settings, on this machine, under Slurm or through SkyPilot."""
