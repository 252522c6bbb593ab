"""The operations of a decoder layer between its linear layers: norms, rotary embedding, activations."""
