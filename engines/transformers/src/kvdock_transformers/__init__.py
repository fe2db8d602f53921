"""Hugging Face transformers caches as kvdock pages, and the `demo` command.

Importing this package loads nothing else. `pools` and `pages` are the adapter:
they describe a cache, take it apart and put it back. The rest is the trial
behind `kvdock demo --models`.
"""
