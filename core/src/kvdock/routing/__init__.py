"""Which backend gets which pool, and why."""
