"""Hugging Face checkpoints: import into and export from a distributed Megatron model."""
