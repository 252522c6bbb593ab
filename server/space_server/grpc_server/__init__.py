"""The worker's gRPC service: one router session at a time."""
