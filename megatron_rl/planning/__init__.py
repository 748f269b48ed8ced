"""Predictions of training runs, which need no GPU, and tests of machines.

A training run does not import this package.
"""
