"""Networks, weights, paged keys and values, and the pure-integer geometry of a SPACE step."""
