"""Predictions of runs on GPUs that need not exist yet, and tests of machines.

A training run does not import this package.
"""
