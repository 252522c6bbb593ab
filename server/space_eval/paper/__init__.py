"""The table of the paper (arXiv 2402.11809), measured by its protocol."""
