"""Observers: plugins that wrap hooks but never implement them."""
