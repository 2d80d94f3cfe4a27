"""The subcommands of `path-backend`."""
