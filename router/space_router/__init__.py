"""The router: HTTP and gRPC APIs, text processing, scheduling, KV cache pages, workers. Never imports torch."""
