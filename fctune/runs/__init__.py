"""A finished or running training run, read back from its directory. torch is not imported."""
