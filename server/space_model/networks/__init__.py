"""Networks that compute packed rows over the paged KV cache."""
