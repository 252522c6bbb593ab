"""Property-based tests with hostile inputs: none may crash, hang, or be answered with a 5xx status."""
