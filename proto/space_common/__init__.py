"""What router and server share besides the protocol."""
