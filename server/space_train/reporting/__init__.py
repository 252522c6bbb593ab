"""Model card and run report."""
