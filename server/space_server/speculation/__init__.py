"""How many drafts a step lays out."""
