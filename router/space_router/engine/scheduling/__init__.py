"""Which requests run on a worker, and on which blocks."""
