"""Predict what a run takes before machines are there, and prove machines: nothing of a run imports it."""
