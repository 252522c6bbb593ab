"""Stand-ins for servers, models and clocks that several tests use."""
