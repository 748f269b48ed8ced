"""Predictions of a run before there are machines, and proofs of machines: nothing of a run imports it."""
