"""What only a GPU can show: `pytest -m gpu tests/gpu`, or `python -P -m gpu` with a process for each stage."""
