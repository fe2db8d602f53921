"""Pages straight from one process's memory to another's: requests of two engines."""
