"""Drafts: their sources and how likely they are accepted."""
