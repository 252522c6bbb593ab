"""From hidden rows to logits: the output head and the draft head."""
