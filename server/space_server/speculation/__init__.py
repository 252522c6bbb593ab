"""Chooses how many drafts a step lays out."""
