"""How many drafts are accepted, what that is worth in seconds, and that drafts change no text."""
