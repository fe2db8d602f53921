"""LMCache's second level in any storage that kvdock has a plugin for.

LMCache loads `kvdock_lmcache.adapter` by its module path. Importing this package
imports neither LMCache nor torch.
"""
