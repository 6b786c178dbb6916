"""Models behind one interface for training, with attention, LoRA, frozen bases, loss, loading and export."""
