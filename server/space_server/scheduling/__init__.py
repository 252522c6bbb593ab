"""Which rows each sequence gets in the next step."""
