"""One step on the device: state, draft head, verification, synthetic acceptance."""
