"""Advantage estimators: their form in `advantage`, and the estimators by family."""
