"""A worker, as router and worker know it: its settings, its port and the secret of that, and a client of it."""
