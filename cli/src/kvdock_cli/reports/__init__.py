"""Reports: pure functions from data to text and to JSON."""
