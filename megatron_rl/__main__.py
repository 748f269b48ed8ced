"""Run a command: ``python -m megatron_rl COMMAND …``, as ``megatron-rl`` does, or under torchrun."""

import sys

from megatron_rl.cli.main import main

# Processes that are spawned while a checkpoint is saved import this module again, and must not run a command.
if __name__ == "__main__":
    sys.exit(main())
