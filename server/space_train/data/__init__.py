"""Training data: sources, records, examples, packed rows."""
