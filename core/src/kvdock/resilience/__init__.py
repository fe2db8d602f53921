"""Deadlines, circuit breaker and bounded concurrency of one backend."""
