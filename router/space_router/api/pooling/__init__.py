"""Embeddings, scores and rankings of texts, by the encoder beside the model or by the model itself."""
