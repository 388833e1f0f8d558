"""Checkpoints on disk: configuration and tensors by their Hugging Face names."""
