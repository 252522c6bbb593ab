"""Predicts the duration of a step from its shape."""
