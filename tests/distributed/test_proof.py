"""The first command on machines of one's own: every step of it.

Its jobs are forked here; `tests/unit/test_proof.py` has one executed as a person's are.
"""

from __future__ import annotations

import socket
from pathlib import Path

from megatron_rl.metrics import read_metrics

WORKERS = Path(__file__).parent / "workers"
DOCTOR = "tests.distributed.workers.forked_doctor"


def test_ranks_prove_the_machine_that_they_are_on(forked_torchrun, tmp_path: Path):
    folder = tmp_path / "proof"
    code, output = forked_torchrun(DOCTOR, "doctor", "--gpu", "--out", folder, timeout=550.0)
    assert code == 0 and "HEALTHY" in output and "NOT HEALTHY" not in output
    for words in (
        "GB/s within a machine, ranks 0 and 1 the slowest",
        "TFLOP/s bfloat16 on rank",
        "(relative) of those on one rank",
        "MiB a rank in",
        "log-probs differ by",
        "resume from the checkpoint",
    ):
        assert words in output
    assert [line["step"] for line in read_metrics(folder / "train/metrics.jsonl")] == [1, 2, 3]
    assert "step_2 at step 2" in (folder / "logs/train_0.log").read_text()


def test_errors_of_another_machine_are_told_by_the_first_rank(fork):
    done = fork(WORKERS / "doctor_of_a_bad_machine.py", 2, check=False)
    host = socket.gethostname()
    assert done.returncode != 0
    assert "temporary files" in done.stdout and f"{host}, rank 1: /nowhere is not a directory" in done.stdout
    assert "NOT HEALTHY: 1 to fix" in done.stdout and "all-reduce" in done.stdout
    assert f"{host}, rank 1: temporary files: /nowhere is not a directory; fix: set TMPDIR" in done.stderr
