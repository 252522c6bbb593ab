"""Drafts that a model makes on the host: by masks, by a recurrent head, or by a network beside it."""
