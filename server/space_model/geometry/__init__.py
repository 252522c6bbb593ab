"""Pure-integer geometry of a step: layouts of drafts and masks, packed rows."""
