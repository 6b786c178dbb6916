"""Records of training runs, read back from their directories. torch is not imported."""
