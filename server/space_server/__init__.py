"""The worker: takes sequences from the router and steps them, one forward pass at a time."""
