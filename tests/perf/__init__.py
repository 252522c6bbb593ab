"""Measurements of single parts of the product, for its developers: `.venv/bin/python tests/perf NAME …`."""
