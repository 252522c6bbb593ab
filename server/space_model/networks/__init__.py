"""Networks that compute packed rows over paged keys and values."""
