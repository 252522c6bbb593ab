"""The check at load: our network against transformers, layer by layer."""
