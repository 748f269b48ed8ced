"""Predict step times, memory and weight-sync traffic of a cluster, and search for the best placement."""
