"""Routes for operators and tools: health, info, workers, tokens, documentation."""
