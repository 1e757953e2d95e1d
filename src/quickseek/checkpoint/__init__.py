"""Hugging Face checkpoints in and out: the inventory of tensors, lazy reading of slices, writing, the miniature."""
