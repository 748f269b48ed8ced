"""Train with TRL's GRPOTrainer on the workload of step_time.py; runs in benchmarks/.venv-trl under torchrun.

The settings follow TRL's recommendations, as far as they exist on a CPU: one optimizer step per generated
batch, no reference model (beta 0), float32, no gradient checkpointing (the memory is sufficient), generation
by transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from common import versions
from workload import digit_share


def reward(
    prompts: list[str],
    completions: list[str],
    ground_truth: list[str],
    **_: Any,
) -> list[float]:
    """Compute the rewards of completions with the reward function of megatron_rl's run."""
    return [digit_share(*row) for row in zip(prompts, completions, ground_truth, strict=True)]


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="holds model/ and prompts.jsonl")
    parser.add_argument("result", type=Path, help="JSON file to write")
    for name in ("prompts", "samples", "max-response-tokens", "steps", "rows-per-microbatch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--continuous-batching", action="store_true")
    return parser.parse_args()


def settings(options: argparse.Namespace) -> Any:
    """Return GRPOTrainer's configuration."""
    from trl import GRPOConfig

    # A step generates one batch, and takes one optimizer step on it.
    rows_per_process = options.prompts * options.samples // int(os.environ["WORLD_SIZE"])
    return GRPOConfig(
        output_dir=str(options.directory / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=options.rows_per_microbatch,
        gradient_accumulation_steps=rows_per_process // options.rows_per_microbatch,
        num_generations=options.samples,
        max_completion_length=options.max_response_tokens,
        temperature=1.0,
        learning_rate=1e-6,
        beta=0.0,
        loss_type="grpo",
        max_steps=options.steps,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_transformers_continuous_batching=options.continuous_batching,
        # By default, each process would use nearly all of the host's memory.
        transformers_continuous_batching_config={"num_blocks": 128, "max_batch_tokens": 512},
    )


def main() -> None:
    """Train, and write seconds, generation seconds and mean response length of each step."""
    options = parse()
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    lines = [json.loads(line) for line in (options.directory / "prompts.jsonl").read_text().splitlines()]
    seconds: list[float] = []
    generation_seconds: list[float] = []

    class StepTimer(TrainerCallback):
        """Timer of complete steps: generation, scoring, loss, backward, optimizer."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.start)

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.directory / "model", dtype=torch.float32),
        reward_funcs=reward,
        args=settings(options),
        train_dataset=Dataset.from_list(lines),
        processing_class=AutoTokenizer.from_pretrained(options.directory / "model"),
        callbacks=[StepTimer()],
    )
    original_generate = trainer._generate

    # The trainer has no callback for generation, so its method is wrapped.
    def timed_generate(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = original_generate(*args, **kwargs)
        generation_seconds.append(time.perf_counter() - start)
        return result

    trainer._generate = timed_generate
    trainer.train()

    # Only rank 0 writes the result.
    if int(os.environ["RANK"]):
        return
    # With logging_steps=1 the log has one entry per step.
    lengths = [
        entry["completions/mean_length"]
        for entry in trainer.state.log_history
        if "completions/mean_length" in entry
    ]
    result = {
        "seconds": seconds,
        "generate": generation_seconds,
        "length": lengths,
        "versions": versions(),
    }
    options.result.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
