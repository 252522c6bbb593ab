"""Before the first request: checks, memory, calibration, doctor."""
