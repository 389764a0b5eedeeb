"""The `histate` command."""
