"""Networks that draft for a model and keep keys and values of their own: another model, or layers behind its last."""
