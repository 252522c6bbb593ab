"""What is trained: decoder, masks, adapters, draft head, and their losses."""
