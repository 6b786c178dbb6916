"""Activations kept in the host's memory, by torchtune, for models of any source. Imported on a CUDA device only."""

from torchtune.training import OffloadActivations

__all__ = ["OffloadActivations"]
