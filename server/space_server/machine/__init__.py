"""This machine: cores, memory, load, energy, threads."""
