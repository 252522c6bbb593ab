"""Selects the rows that each sequence gets in the next step."""
