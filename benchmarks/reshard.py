"""Weight transfer from Megatron shards into vLLM: the hybrid engine against the field's algorithms.

    python benchmarks/reshard.py [--quick] [--repeats N] [--json FILE] [--cases tp2pp2-tp2x2,...]

Per case one job of 4 ranks holds one Megatron model and one vLLM engine; the methods take turns in it, and
after each the engine's parameters are compared bit for bit with the first method's. A case named
``tp2pp2-tp2x2`` trains with tensor 2 × pipeline 2 and generates with 2 replicas of tensor 2;
``tp2pp2-megatron-tp2dp2`` moves into another Megatron model instead.

hybrid_engine           the plan of least traffic, without checksums (no other method has any)
hybrid_engine_verified  the same with every checksum compared, as it runs by default
gather_all              every rank gathers the whole model, then one load_weights
per_tensor              per tensor: broadcast over the pipeline, gather over tensor ranks, load_weights (verl)
bucketed                the same in buckets of 16 MiB (mbridge, Megatron-Bridge, NeMo-RL)
mbridge                 mbridge's own export_weights into load_weights, if installed
core_resharding         Megatron-Core's own resharding, Megatron to Megatron

gather_all, per_tensor and bucketed are implementations of these algorithms in reshard_peers.py, not the
projects' code. Metrics: seconds; bytes_received_max, the most that one rank receives over the wire by the
method's own count; staging_peak_bytes, the most bytes of temporary tensors alive at once on any rank, seen
by counting allocations in an extra pass that is not timed. The hybrid engine's plan has two more:
messages_max, the most messages that one rank sends or receives, and peers_max, the most ranks that it
exchanges them with.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from common import HERE, ChildFailed, Report, arguments, paired_ratio, say, torchrun, warn_if_busy

CASES = ("tp2pp2-tp2x2", "tp4-tp2x2", "tp2pp2-tp4", "pp4-tp2x2", "tp2pp2-megatron-tp2dp2")
OURS = "hybrid_engine"
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
    """Run one case in its own job and record every method beside the hybrid engine."""
    say("reshard", f"{case}: 4 ranks, {repeats} repeats")
    result = folder / f"{case}.json"
    command = [str(HERE / "reshard_worker.py"), case, str(repeats), str(int(quick)), str(result)]
    try:
        torchrun(command, 4, 1, folder / f"{case}.log", 1800)
    except ChildFailed as error:
        report.fail(f"{case}: {error}")
        return

    methods = json.loads(result.read_text())
    base = methods[OURS]["seconds"]
    for method, metrics in methods.items():
        for metric, values in metrics.items():
            # Seconds are measured in turns, bytes are the same every time.
            ratio = None
            if metric == "seconds" and method != OURS:
                ratio = paired_ratio(values, base)
            report.add(case, method, metric, UNITS[metric], values, ratio)


def main() -> int:
    """Measure the cases and print the table."""
    parser = arguments(__doc__, repeats=7)
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated names")
    options = parser.parse_args()

    warn_if_busy("reshard")
    report = Report("reshard")
    report.note("ratio to peer: the method's seconds over hybrid_engine's, median over neighbouring repeats")
    default_repeats = 3 if options.quick else 7
    repeats = options.repeats or default_repeats
    # The folder has the result and the log of each job.
    with tempfile.TemporaryDirectory() as folder:
        for case in options.cases.split(","):
            measure(case, Path(folder), options.quick, repeats, report)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
