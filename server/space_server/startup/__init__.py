"""Start-up: checks, memory, calibration, doctor."""
