"""Workers of the router: processes, connections, restarts and crashes."""
