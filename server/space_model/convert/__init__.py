"""`spaceserve convert`."""
