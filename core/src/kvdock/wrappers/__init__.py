"""Wrappers that come with kvdock: stores around stores."""
