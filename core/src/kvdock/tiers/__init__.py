"""Tiers: the same pages in several backends, from near to far.

`chain` finds, loads and stores the pages of one pool over its tiers; `copier` copies
pages from one tier to another later; `shared_loads` loads a far page once for all that
ask for it; `rows` is the memory of the core that both move pages through.
"""
