"""Accepted drafts, the speed-up they give, and the check that drafts change no text."""
