"""Training: a corpus of permissively licensed Python, a tokenizer, a small Llama, its masks and its draft head."""
