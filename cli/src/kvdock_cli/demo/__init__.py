"""A demo without a model: pages of random bytes, stored and restored for real."""
