"""Integer layout of a step: drafts, masks and packed rows."""
