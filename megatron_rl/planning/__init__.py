"""Predictions of a run without machines, and tests of machines; no code of a run imports this package."""
