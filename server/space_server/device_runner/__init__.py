"""Steps whose state is on the device."""
