"""The `kvdock` command."""
