"""What router and worker know of tokenizers."""
