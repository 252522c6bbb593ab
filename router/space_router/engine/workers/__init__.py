"""Connections to workers: processes, links, restarts and crashes."""
