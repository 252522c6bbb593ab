"""Workers as the router meets them: a process to keep alive, and a stream to talk over."""
