"""Model descriptions and the pools that a deployment gets from them."""
