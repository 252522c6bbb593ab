"""From hidden states to logits: the output head and the draft head."""
