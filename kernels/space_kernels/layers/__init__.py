"""What a decoder layer computes between its linears: norms, rotary positions, activations."""
