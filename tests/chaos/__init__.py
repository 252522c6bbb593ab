"""A server under load while something breaks: nothing may be lost.

PYTHONPATH=tests .venv/bin/python -P -m chaos EXPERIMENT [FLAG …] [-- FLAG of `spaceserve serve` …]
"""
