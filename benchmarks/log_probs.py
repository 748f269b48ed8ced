"""Measure time and memory of methods that compute log-probs and entropy from hidden states, in one process.

    python benchmarks/log_probs.py [--quick] [--repeats N] [--json FILE] [--size tokens,hidden,vocabulary]

chunked   this package's method: logits of one tile at a time, projected again in the backward pass
kernel    this package's method on an accelerator with Triton: a tile is read once in each pass
unfused   all logits at once through autograd: log_softmax, gather, entropy
liger     Liger's fused linear cross entropy, if installed; it has no entropy and no gradient of it

The methods take turns. First, the log-probs, entropies and gradients of 256 tokens are compared with float64.
A method with wrong results is not measured. Ratios are relative to unfused. Metrics:

score, train   seconds of the forward pass without gradients, and of the forward and backward pass
of_matmul      necessary FLOP per second (2 × tokens × hidden × vocabulary in the forward pass, three times as
               many in training) relative to a large matrix product in the same dtype on this machine
of_bandwidth   bytes per second that every method must read and write, relative to a large copy
peak_bytes     peak size of the tensors of a training pass without the inputs
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
from common import Report, make_parser, paired_ratio, print_progress, warn_if_busy
from live_bytes import LiveBytes

from megatron_rl.distributed import device
from megatron_rl.megatron import log_probs as log_probs_module
from megatron_rl.megatron.log_probs import VocabularyShard, vocab_parallel_log_probs
from megatron_rl.shapes.memory import LOGITS_ELEMENTS

Outputs = tuple[torch.Tensor, torch.Tensor | None]
Method = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Outputs]
ONE_RANK: Any = SimpleNamespace(size=lambda: 1)
"""Tensor-parallel group of one rank."""
CHECKED_TOKENS = 256
"""Number of tokens whose results are compared with float64."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


@contextmanager
def triton_kernels(enabled: bool) -> Any:
    """Enable or disable the Triton kernels of `vocab_parallel_log_probs` in the block."""
    choose_reductions = log_probs_module.choose_reductions
    reductions = log_probs_module.triton_reductions() if enabled else log_probs_module.TORCH
    setattr(log_probs_module, "choose_reductions", lambda _: reductions)
    try:
        yield
    finally:
        setattr(log_probs_module, "choose_reductions", choose_reductions)


def make_vocab_parallel_method(with_kernels: bool) -> Method:
    """Return `vocab_parallel_log_probs` as a method, with or without Triton kernels."""

    def method(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
    ) -> Outputs:
        temperature = torch.ones(len(hidden), device=hidden.device)
        shard = VocabularyShard(0, len(weight), ONE_RANK)
        chunk = max(64, LOGITS_ELEMENTS // len(weight))
        with triton_kernels(with_kernels):
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
    """Compute log-probs and entropy from all logits at once."""
    # Sum over the vocabulary in float32 or a wider dtype.
    logits = hidden @ weight.t()
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def liger(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
) -> Outputs:
    """Compute the sum of the log-probs; Liger computes its gradients in the forward pass."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # pyright: ignore

    return -LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, hidden, targets)[None], None


def methods(dtype: torch.dtype) -> dict[str, Method]:
    """Return the methods that can run on this machine, by name."""
    available: dict[str, Method] = {"chunked": make_vocab_parallel_method(False), "unfused": unfused}
    if not device.on_host():
        if importlib.util.find_spec("triton") is not None and log_probs_module.kernels_work(dtype):
            available["kernel"] = make_vocab_parallel_method(True)
        if importlib.util.find_spec("liger_kernel") is not None:
            available["liger"] = liger
    return available


class Case:
    """Tensors of one problem size, and the passes that are measured."""

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
        # Draw the values on the host, so that they are equal on all machines.
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
        """Return the largest relative error of outputs and gradients against float64, for a few tokens."""
        hidden = self.hidden[:CHECKED_TOKENS].detach()
        targets = self.targets[:CHECKED_TOKENS]

        def results(
            method: Method,
            dtype: torch.dtype,
            with_entropy: bool,
        ) -> list[torch.Tensor]:
            states = hidden.to(dtype).requires_grad_()
            weight = self.weight.detach().to(dtype).requires_grad_()
            log_probs, entropy = method(states, weight, targets)
            loss = log_probs.sum()
            values = [log_probs.sum()[None]]
            if entropy is not None and with_entropy:
                loss = loss + 0.1 * entropy.sum()
                values = [log_probs, entropy]
            return [*values, *torch.autograd.grad(loss, (states, weight))]

        # Liger returns only the sum of the log-probs, and no entropy.
        actual = results(method, self.dtype, method is not liger)
        expected = results(unfused, torch.float64, method is not liger)
        return max(
            float((value.double() - reference).detach().abs().max() / reference.detach().abs().max())
            for value, reference in zip(actual, expected, strict=True)
        )

    def peak(self, method: Method) -> int:
        """Return the peak size in bytes of the tensors of a training pass, without the inputs."""
        if device.on_host():
            with LiveBytes() as live_bytes:
                self.train(method)
            return live_bytes.peak
        device.synchronize()
        device.peak_memory(reset=True)
        # Subtract the inputs and weights.
        input_bytes = device.peak_memory()
        self.train(method)
        device.synchronize()
        return device.peak_memory() - input_bytes


def measure_seconds(run: Callable[[], None]) -> float:
    """Return the seconds of a run until all its work on the device is complete."""
    device.synchronize()
    start = time.perf_counter()
    run()
    device.synchronize()
    return time.perf_counter() - start


def measure_peak_rates(dtype: torch.dtype, quick: bool) -> tuple[float, float]:
    """Return the FLOP per second of a large matrix product, and the bytes per second of a large copy."""
    size = 8192
    if device.on_host():
        size = 1024 if quick else 2048
    matrix, factor = (torch.randn(size, size, device=device.device()).to(dtype) for _ in range(2))
    result = torch.empty_like(matrix)
    source = torch.empty(size * size * 8, device=device.device())
    target = torch.empty_like(source)

    # Use the fastest of five repeats.
    product_seconds = [
        measure_seconds(lambda: discard(torch.mm(matrix, factor, out=result))) for _ in range(5)
    ]
    copy_seconds = [measure_seconds(lambda: discard(target.copy_(source))) for _ in range(5)]
    return 2 * size**3 / min(product_seconds), 2 * source.nbytes / min(copy_seconds)


def discard(value: Any) -> None:
    """Discard a value, so that a lambda function returns None."""


def measure(
    case: Case,
    quick: bool,
    repeats: int,
    report: Report,
) -> None:
    """Check and measure every method on one problem size."""
    tokens, width, vocabulary = case.sizes
    name = f"{tokens} tokens, hidden {width}, vocabulary {vocabulary}, {str(case.dtype)[6:]}"

    # A method with wrong results is a failure, and is not measured.
    correct_methods: dict[str, Method] = {}
    for method_name, method in methods(case.dtype).items():
        error = case.error(method)
        if error > TOLERANCE[case.dtype]:
            report.fail(f"{method_name}: wrong by {error:.3g}")
            continue
        correct_methods[method_name] = method
        # Warm up: kernels compile, and memory is allocated.
        case.train(method)

    # Name of a pass -> its function, and its FLOPs relative to the forward pass.
    passes: dict[str, tuple[Callable[[Method], None], int]] = {
        "score": (case.score, 1),
        "train": (case.train, 3),
    }
    peak_flops, peak_bandwidth = measure_peak_rates(case.dtype, quick)
    report.note(
        f"a large matrix product reaches {peak_flops / 1e9:,.0f} GFLOP/s, "
        f"a copy {peak_bandwidth / 1e9:,.1f} GB/s"
    )
    input_bytes = case.hidden.nbytes + case.weight.nbytes
    for pass_name, (run, flops_ratio) in passes.items():
        seconds: dict[str, list[float]] = {method_name: [] for method_name in correct_methods}
        for _ in range(repeats):
            for method_name, method in correct_methods.items():
                run_seconds = measure_seconds(lambda run=run, method=method: run(method))
                seconds[method_name].append(run_seconds)
        flops = flops_ratio * 2 * tokens * width * vocabulary
        for method_name, values in seconds.items():
            ratio = None
            if method_name != "unfused" and "unfused" in seconds:
                ratio = paired_ratio(values, seconds["unfused"])
            report.add(name, method_name, pass_name, "s", values, ratio)
            flops_shares = [flops / value / peak_flops for value in values]
            report.add(name, method_name, f"{pass_name}_of_matmul", "share", flops_shares)
            # Training also writes gradients of the inputs.
            traffic = input_bytes if pass_name == "score" else 2 * input_bytes
            bandwidth_shares = [traffic / value / peak_bandwidth for value in values]
            report.add(name, method_name, f"{pass_name}_of_bandwidth", "share", bandwidth_shares)
    for method_name, method in correct_methods.items():
        report.add(name, method_name, "peak_bytes", "bytes", [case.peak(method)])


def main() -> int:
    """Measure one problem size and print the table."""
    parser = make_parser(__doc__, repeats=5)
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
    print_progress("log_probs", f"{tokens} tokens, hidden {width}, vocabulary {vocabulary}, {dtype}")
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
