"""A fake of 3FS's Python module, for tests alone."""
