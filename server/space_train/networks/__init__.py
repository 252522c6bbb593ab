"""The trained modules: decoder, masks, adapters and draft head, and their losses."""
