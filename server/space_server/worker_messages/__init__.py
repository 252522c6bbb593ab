"""What the worker reports: its hello, steps and sequences."""
