"""Run ``doctor`` on a job whose second rank has no folder for temporary files."""

import os
import sys

from megatron_rl.cli.main import main

# The doctor has to report this rank, although the other one is healthy.
if os.environ["RANK"] == "1":
    os.environ["TMPDIR"] = "/nowhere"
sys.exit(main(["doctor", "--quick"]))
