"""The demo of direct transfer: one process prefills, another one decodes."""
