"""Entry point of ``python -m megatron_rl COMMAND …``, which runs the same commands as ``megatron-rl``."""

import sys

from megatron_rl.cli.main import main

# Processes that are spawned while a checkpoint is saved import this module again, and must not run a command.
if __name__ == "__main__":
    sys.exit(main())
