"""The machine's cores, memory, load, energy and threads."""
