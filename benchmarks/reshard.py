"""Measure weight transfer from Megatron into vLLM: the hybrid engine, and the algorithms of other projects.

    python benchmarks/reshard.py [--quick] [--repeats N] [--json FILE] [--cases tp2pp2-tp2x2,...]

Each case is one job of 4 ranks with one Megatron model and one vLLM engine. The methods take turns in the
job. Each method must fill the engine's parameters with the same bits as the first method. A case named
``tp2pp2-tp2x2`` trains with tensor 2 × pipeline 2 and generates with 2 replicas of tensor 2;
``tp2pp2-megatron-tp2dp2`` moves the weights into another Megatron model instead.

hybrid_engine           the plan of least traffic, without checksums (no other method has checksums)
hybrid_engine_verified  the same with all checksums compared, as in a run by default
gather_all              every rank gathers the complete model, then one load_weights
per_tensor              per tensor: broadcast over the pipeline, gather over tensor ranks, load_weights (verl)
bucketed                the same in buckets of 16 MiB (mbridge, Megatron-Bridge, NeMo-RL)
mbridge                 mbridge's own export_weights into load_weights, if installed
core_resharding         Megatron-Core's own resharding, Megatron to Megatron

gather_all, per_tensor and bucketed are implementations of these algorithms in reshard_peers.py, not the
projects' code. Metrics, each of the rank with the largest value: seconds; bytes_received_max, the bytes
received over the wire, as the method counts them; staging_peak_bytes, the peak size of temporary tensors,
counted in an extra pass that is not timed. The hybrid engine has two more metrics: messages_max, the messages
that a rank sends or receives, and peers_max, the ranks with which it exchanges messages.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from common import (
    HERE,
    ChildFailed,
    Report,
    make_parser,
    paired_ratio,
    print_progress,
    torchrun,
    warn_if_busy,
)

CASES = ("tp2pp2-tp2x2", "tp4-tp2x2", "tp2pp2-tp4", "pp4-tp2x2", "tp2pp2-megatron-tp2dp2")
REFERENCE_METHOD = "hybrid_engine"
UNITS = {
    "seconds": "s",
    "bytes_received_max": "bytes",
    "staging_peak_bytes": "bytes",
    "messages_max": "messages",
    "peers_max": "ranks",
}


def measure(
    case: str,
    folder: Path,
    quick: bool,
    repeats: int,
    report: Report,
) -> None:
    """Run one case in a separate job, and record each method with its ratio to the hybrid engine."""
    print_progress("reshard", f"{case}: 4 ranks, {repeats} repeats")
    result = folder / f"{case}.json"
    command = [str(HERE / "reshard_worker.py"), case, str(repeats), str(int(quick)), str(result)]
    try:
        torchrun(command, 4, 1, folder / f"{case}.log", 1800)
    except ChildFailed as error:
        report.fail(f"{case}: {error}")
        return

    methods = json.loads(result.read_text())
    reference_seconds = methods[REFERENCE_METHOD]["seconds"]
    for method, metrics in methods.items():
        for metric, values in metrics.items():
            # Only seconds vary between repeats, so only they have a ratio.
            ratio = None
            if metric == "seconds" and method != REFERENCE_METHOD:
                ratio = paired_ratio(values, reference_seconds)
            report.add(case, method, metric, UNITS[metric], values, ratio)


def main() -> int:
    """Measure the cases and print the table."""
    parser = make_parser(__doc__, repeats=7)
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated names")
    options = parser.parse_args()

    warn_if_busy("reshard")
    report = Report("reshard")
    report.note("ratio to peer: the method's seconds over hybrid_engine's, median over neighbouring repeats")
    default_repeats = 3 if options.quick else 7
    repeats = options.repeats or default_repeats
    # The folder contains the result and the log of each job.
    with tempfile.TemporaryDirectory() as folder:
        for case in options.cases.split(","):
            measure(case, Path(folder), options.quick, repeats, report)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
