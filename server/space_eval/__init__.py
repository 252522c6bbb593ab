"""Equivalence, acceptance, quality and load, measured and reported."""
