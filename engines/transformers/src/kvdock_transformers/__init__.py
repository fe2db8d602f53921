"""Hugging Face transformers caches as kvdock pages.

Importing this package loads nothing else. `pools` and `pages` describe a cache, take
it apart and put it back; `paged` does so for a model at work on a prompt.
"""
