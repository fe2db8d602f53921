"""The demo: store pages, damage some, restore the rest in a new process."""
