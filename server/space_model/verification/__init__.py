"""The check at load: compares our network with transformers, layer by layer."""
