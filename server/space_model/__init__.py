"""Networks, weights, the paged KV cache, and the integer layout of a SPACE step's rows."""
