"""Published chat templates: what they write of a call is what our parsers read."""
