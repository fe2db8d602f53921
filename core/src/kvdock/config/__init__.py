"""Settings: declared with attrs, filled from files, environment and engine."""
