"""Steps whose state is on the host."""
