"""The contract between router and worker: messages, stubs, and nothing else."""
