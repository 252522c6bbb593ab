"""The front house: HTTP, text, scheduling, pages, workers. Never imports torch."""
