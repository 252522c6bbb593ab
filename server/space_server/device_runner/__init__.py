"""Runs steps whose state is kept on the device."""
