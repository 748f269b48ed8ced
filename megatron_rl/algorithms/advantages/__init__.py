"""Advantage estimators: pure functions by family, and their uniform form in `pieces`."""
