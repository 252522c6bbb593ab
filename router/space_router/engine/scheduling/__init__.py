"""Scheduling of one worker: its running sequences and their blocks."""
