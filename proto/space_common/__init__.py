"""Code shared by router and server besides the protocol."""
