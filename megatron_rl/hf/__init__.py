"""Hugging Face names and shapes: model settings, import and export of checkpoints."""
