"""Parameters and activations over ranks: DDP, FSDP, HSDP and activation checkpointing."""
