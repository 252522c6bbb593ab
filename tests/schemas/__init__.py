"""JSON schemas as people write them: how many are taken, and whether texts made under them keep to them."""
