"""Time and memory of implementations of log-probs and entropy from hidden states, in one process.

    python benchmarks/log_probs.py [--quick] [--repeats N] [--json FILE] [--size tokens,hidden,vocabulary]

chunked   ours: logits of a tile at a time, projected again in the backward pass
kernel    ours on an accelerator with Triton: a tile is read once in each pass
unfused   all logits at once through autograd: log_softmax, gather, entropy
liger     Liger's fused linear cross entropy, if installed; it has no entropy and no gradient of it

The methods take turns. Each is checked first: log-probs, entropy and gradients against float64 (of the
first 256 tokens' outputs), or it is not measured. Metrics: seconds of the forward pass without gradients
(scoring) and of forward and backward pass (training); peak_bytes, the most bytes of tensors alive at once in
training beyond the inputs; of_matmul, the useful products (2 × tokens × hidden × vocabulary forward, three
times that in training) per second as a share of the rate of a large matrix product here in the same dtype;
of_bandwidth, the bytes that any method has to read and write per second as a share of a large copy's.
The peer of the ratio is unfused.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from common import Report, arguments, paired_ratio, say, warn_if_busy
from live_bytes import LiveBytes

from megatron_rl.distributed import device
from megatron_rl.megatron import log_probs as ours
from megatron_rl.megatron.log_probs import VocabularyShard, vocab_parallel_log_probs
from megatron_rl.shapes.memory import LOGITS_ELEMENTS

Outputs = tuple[torch.Tensor, torch.Tensor | None]
Method = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Outputs]
ONE_RANK: Any = SimpleNamespace(size=lambda: 1)
"""Tensor-parallel group of this process."""
CHECKED_TOKENS = 256
"""Tokens whose results are compared with float64's."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


@contextmanager
def kernel(use: bool) -> Any:
    """Enable or disable the Triton kernels of our function."""
    choose_reductions = ours.choose_reductions
    reductions = ours.triton_reductions() if use else ours.TORCH
    setattr(ours, "choose_reductions", lambda _: reductions)
    try:
        yield
    finally:
        setattr(ours, "choose_reductions", choose_reductions)


def own(use: bool) -> Method:
    """Return our function with or without the kernel."""

    def method(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
    ) -> Outputs:
        temperature = torch.ones(len(hidden), device=hidden.device)
        shard = VocabularyShard(0, len(weight), ONE_RANK)
        chunk = max(64, LOGITS_ELEMENTS // len(weight))
        with kernel(use):
            return vocab_parallel_log_probs(
                hidden,
                weight,
                targets,
                temperature,
                shard,
                chunk,
            )

    return method


def unfused(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
) -> Outputs:
    """Return log-probs and entropy from all logits at once."""
    # The sum over the vocabulary is in float32 at least.
    logits = hidden @ weight.t()
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def liger(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
) -> Outputs:
    """Return the sum of log-probs; Liger computes its gradients in the forward pass."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # pyright: ignore

    return -LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, hidden, targets)[None], None


def methods(dtype: torch.dtype) -> dict[str, Method]:
    """Return the methods that can run here, by name."""
    available: dict[str, Method] = {"chunked": own(False), "unfused": unfused}
    if not device.on_host():
        if importlib.util.find_spec("triton") is not None and ours.kernels_work(dtype):
            available["kernel"] = own(True)
        if importlib.util.find_spec("liger_kernel") is not None:
            available["liger"] = liger
    return available


class Case:
    """Tensors of one problem, with the passes that are measured."""

    def __init__(
        self,
        tokens: int,
        width: int,
        vocabulary: int,
        dtype: torch.dtype,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        accelerator = device.device()
        self.sizes = (tokens, width, vocabulary)
        self.dtype = dtype
        # Drawn on the host, so that all machines have the same numbers.
        self.hidden = torch.randn(tokens, width, generator=generator).to(accelerator, dtype).requires_grad_()
        weight = torch.randn(vocabulary, width, generator=generator) / width**0.5
        self.weight = weight.to(accelerator, dtype).requires_grad_()
        self.targets = torch.randint(0, vocabulary, (tokens,), generator=generator).to(accelerator)

    def score(self, method: Method) -> None:
        """Run the forward pass without gradients."""
        with torch.no_grad():
            method(self.hidden, self.weight, self.targets)

    def train(
        self,
        method: Method,
        entropy_weight: float = 0.1,
    ) -> None:
        """Run the forward and the backward pass."""
        log_probs, entropy = method(self.hidden, self.weight, self.targets)
        loss = log_probs.sum()
        if entropy is not None:
            loss = (log_probs + entropy_weight * entropy).sum()
        torch.autograd.grad(loss, (self.hidden, self.weight))

    def error(self, method: Method) -> float:
        """Return the largest relative difference of values and gradients of a few tokens from float64's."""
        hidden = self.hidden[:CHECKED_TOKENS].detach()
        targets = self.targets[:CHECKED_TOKENS]

        def results(
            call: Method,
            dtype: torch.dtype,
            entropy_too: bool,
        ) -> list[torch.Tensor]:
            states = hidden.to(dtype).requires_grad_()
            weight = self.weight.detach().to(dtype).requires_grad_()
            log_probs, entropy = call(states, weight, targets)
            loss = log_probs.sum()
            values = [log_probs.sum()[None]]
            if entropy is not None and entropy_too:
                loss = loss + 0.1 * entropy.sum()
                values = [log_probs, entropy]
            return [*values, *torch.autograd.grad(loss, (states, weight))]

        # Liger has the sum of the log-probs alone, and no entropy.
        actual = results(method, self.dtype, method is not liger)
        expected = results(unfused, torch.float64, method is not liger)
        return max(
            float((value.double() - reference).detach().abs().max() / reference.detach().abs().max())
            for value, reference in zip(actual, expected, strict=True)
        )

    def peak(self, method: Method) -> int:
        """Return the most bytes alive at once in training beyond the inputs."""
        if device.on_host():
            with LiveBytes() as live:
                self.train(method)
            return live.peak
        device.synchronize()
        device.peak_memory(reset=True)
        # Inputs and weights do not count.
        before = device.peak_memory()
        self.train(method)
        device.synchronize()
        return device.peak_memory() - before


def seconds(run: Callable[[], None]) -> float:
    """Return the time of a run, with all work of the device complete."""
    device.synchronize()
    start = time.perf_counter()
    run()
    device.synchronize()
    return time.perf_counter() - start


def ceilings(dtype: torch.dtype, quick: bool) -> tuple[float, float]:
    """Return products and sums per second of a large matrix product, and bytes per second of a copy."""
    size = 8192
    if device.on_host():
        size = 1024 if quick else 2048
    matrix, factor = (torch.randn(size, size, device=device.device()).to(dtype) for _ in range(2))
    result = torch.empty_like(matrix)
    source = torch.empty(size * size * 8, device=device.device())
    target = torch.empty_like(source)

    # The fastest of five is the ceiling.
    times = [seconds(lambda: void(torch.mm(matrix, factor, out=result))) for _ in range(5)]
    copies = [seconds(lambda: void(target.copy_(source))) for _ in range(5)]
    return 2 * size**3 / min(times), 2 * source.nbytes / min(copies)


def void(value: Any) -> None:
    """Drop a result."""


def measure(
    case: Case,
    quick: bool,
    repeats: int,
    report: Report,
) -> None:
    """Check and measure every method on one problem."""
    tokens, width, vocabulary = case.sizes
    name = f"{tokens} tokens, hidden {width}, vocabulary {vocabulary}, {str(case.dtype)[6:]}"

    # A method with wrong results is a failure, and is not measured.
    correct: dict[str, Method] = {}
    for method, call in methods(case.dtype).items():
        error = case.error(call)
        if error > TOLERANCE[case.dtype]:
            report.fail(f"{method}: wrong by {error:.3g}")
            continue
        correct[method] = call
        # Warm up: kernels compile, and memory is allocated.
        case.train(call)

    # Pass -> its function, and its products per one of the forward pass.
    passes: dict[str, tuple[Callable[[Method], None], int]] = {
        "score": (case.score, 1),
        "train": (case.train, 3),
    }
    products, bandwidth = ceilings(case.dtype, quick)
    report.note(
        f"a large matrix product reaches {products / 1e9:,.0f} GFLOP/s, a copy {bandwidth / 1e9:,.1f} GB/s"
    )
    input_bytes = case.hidden.nbytes + case.weight.nbytes
    for kind, (run, multiple) in passes.items():
        times: dict[str, list[float]] = {method: [] for method in correct}
        for _ in range(repeats):
            for method, call in correct.items():
                times[method].append(seconds(lambda run=run, call=call: run(call)))
        flops = multiple * 2 * tokens * width * vocabulary
        for method, values in times.items():
            ratio = None
            if method != "unfused" and "unfused" in times:
                ratio = paired_ratio(values, times["unfused"])
            report.add(name, method, kind, "s", values, ratio)
            report.add(
                name, method, f"{kind}_of_matmul", "share", [flops / value / products for value in values]
            )
            # Training also writes gradients of the inputs.
            traffic = input_bytes if kind == "score" else 2 * input_bytes
            shares = [traffic / value / bandwidth for value in values]
            report.add(name, method, f"{kind}_of_bandwidth", "share", shares)
    for method, call in correct.items():
        report.add(name, method, "peak_bytes", "bytes", [case.peak(call)])


def main() -> int:
    """Measure one problem and print the table."""
    parser = arguments(__doc__, repeats=5)
    parser.add_argument("--size", default=None, help="tokens,hidden,vocabulary")
    options = parser.parse_args()

    warn_if_busy("log_probs")
    report = Report("log_probs")
    if device.on_host():
        dtype = torch.float32
        default_size = "512,256,32000" if options.quick else "2048,512,32000"
    else:
        dtype = torch.bfloat16
        default_size = "8192,2048,151936" if options.quick else "8192,4096,151936"
    tokens, width, vocabulary = (int(number) for number in (options.size or default_size).split(","))
    say("log_probs", f"{tokens} tokens, hidden {width}, vocabulary {vocabulary}, {dtype}")
    measure(
        Case(tokens, width, vocabulary, dtype),
        options.quick,
        options.repeats or 5,
        report,
    )
    if device.on_host():
        report.note("no accelerator: the Triton kernel and Liger were not measured")
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
