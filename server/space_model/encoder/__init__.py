"""Encoders: models that make a vector of a text, or a score of two; and vectors by the served model itself."""
