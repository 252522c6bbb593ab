"""Vectors and scores of texts, by the encoder beside the model."""
