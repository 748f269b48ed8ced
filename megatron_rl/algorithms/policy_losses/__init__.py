"""Policy losses: pure per-token functions by family, and their uniform form in `pieces`."""
