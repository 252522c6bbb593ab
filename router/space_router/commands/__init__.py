"""The subcommands of `spaceserve` that talk to a server or check a machine."""
