"""Run a command: ``python -m megatron_rl COMMAND …`` (or under torchrun with ``-m megatron_rl``)."""

import sys

from megatron_rl.cli.main import main

# Saving a checkpoint spawns processes that import this module again; they must not start a command.
if __name__ == "__main__":
    sys.exit(main())
