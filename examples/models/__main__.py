"""Store, restore, damage and send the caches of tiny models: `python examples/models`.

See README.md beside this file.
"""

from model_demo.program import run

if __name__ == "__main__":
    run()
