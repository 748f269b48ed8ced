"""Run ``doctor`` where the machine of the second rank has no place for temporary files."""

import os
import sys

from megatron_rl.cli.main import main

if os.environ["RANK"] == "1":
    os.environ["TMPDIR"] = "/nowhere"
sys.exit(main(["doctor", "--quick"]))
