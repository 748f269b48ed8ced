"""Units and bounds of common kinds of numbers, and the limits of processes that run a user's code.

Every number has an upper bound. A larger value is a mistake of the user, and would overflow later in torch,
vLLM or a timer, with an error that does not name the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.setting import setting

# Largest number of ranks of a job. Products of parallel sizes are compared with it before ranks are listed.
MAX_WORLD = 1 << 16

# Largest number of rows, prompts or samples of a step, which are in memory together.
MAX_ROWS = 1 << 24

# Largest number of tokens of a row or a micro-batch: below 2^31, so that int32 can index them.
MAX_TOKENS = 1 << 30

# Largest number of steps, turns and other sequential events: below 2^31, too.
MAX_STEPS = 10**9

# Largest weight or scale in float32: products of several stay far below its maximum of 3e38.
LARGE = 1e6

# 30 days: longer than any call or wait, and far below the times at which a clock overflows.
_MAX_SECONDS = 30 * 24 * 3600

# Unit and bounds as keyword arguments of `setting`.
Kind = Mapping[str, Any]

# Counts of objects that are in memory together, in a step or a data set.
MANY: Kind = {"at_least": 1, "at_most": MAX_ROWS}

# Counts of sequential events.
ENDLESS: Kind = {"at_least": 1, "at_most": MAX_STEPS}
STEPS: Kind = {"unit": "steps", **ENDLESS}
TOKENS: Kind = {"unit": "tokens", "at_least": 1, "at_most": MAX_TOKENS}
RANKS: Kind = {"unit": "ranks", "at_least": 1, "at_most": MAX_WORLD}
PROCESSES: Kind = {"unit": "processes", "at_least": 1, "at_most": 1024}

# A timeout of 0 would fail every call. A wait of 0 is valid: it means no wait.
SECONDS: Kind = {"unit": "seconds", "more_than": 0, "at_most": _MAX_SECONDS}
WAIT: Kind = {"unit": "seconds", "at_least": 0, "at_most": _MAX_SECONDS}

POSITIVE: Kind = {"more_than": 0, "at_most": LARGE}
WEIGHT: Kind = {"at_least": -LARGE, "at_most": LARGE}
SHARE: Kind = {"at_least": 0, "at_most": 1}


@dataclass(frozen=True)
class LimitsConfig:
    """Limits of a process that runs the user's code, with all the processes that it starts."""

    # Usual code does not reach these limits; an endless list or a file written in a loop does.
    memory_gib: float = setting(8.0, "Memory of a process.", unit="GiB", more_than=0, at_most=1024)
    # At least 16, since Python itself opens files for modules and for the pipes of the worker.
    files: int = setting(256, "Files open at once.", unit="files", at_least=16, at_most=2**20)
    file_gib: float = setting(1.0, "Size of the largest file.", unit="GiB", more_than=0, at_most=1024)
    processes: int = setting(
        64, "Processes that it may have started.", unit="processes", at_least=0, at_most=4096
    )

    # Denied unless allowed: a reward function may run programs that the policy has written.
    network: bool = setting(False, "Allow it to reach the network.")
    read: tuple[str, ...] = setting(
        (),
        "Files and folders that it can read in addition to Python's own, the folder of its code and the "
        "folders that modules are imported from: data, models, or a device such as /dev/nvidia0.",
    )
    write: bool = setting(
        False,
        "Allow it to write to the folder that the run is started in, the folder of its code and the folders "
        "in `read`. Otherwise it has only temporary folders in memory.",
    )
    environment: tuple[str, ...] = setting(
        (),
        "Names of environment variables that it gets in addition to the usual ones (PATH, HOME, LANG, and "
        "those of Python, OpenMP and torch). Secrets have to be named here, too.",
    )
