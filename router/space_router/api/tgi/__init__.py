"""The routes of text-generation-inference."""
