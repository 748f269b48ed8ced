"""Reinforcement learning inside a Megatron-LM training script; with Megatron-LM's folder on PYTHONPATH:

torchrun --nproc-per-node 8 launch/examples/megatron_lm/in_your_loop.py --calculate-per-token-loss --save DIR
"""

# Megatron-LM annotates its globals as None until it is initialised.
# pyright: reportOptionalMemberAccess=false, reportOptionalCall=false

from functools import partial

import torch
from gpt_builders import gpt_builder  # or your own
from megatron.core.enums import ModelType
from megatron.training import get_args, get_timers, initialize_megatron, print_rank_0
from megatron.training.checkpointing import save_checkpoint
from megatron.training.training import setup_model_and_optimizer
from model_provider import model_provider

from megatron_rl import EmbeddedTrainer


def main() -> None:
    """Train as Megatron-LM does, with a step of reinforcement learning in place of `train_step`."""
    initialize_megatron()
    args = get_args()
    timers = get_timers()
    model_and_optimizer = setup_model_and_optimizer(
        partial(model_provider, gpt_builder), ModelType.encoder_or_decoder
    )
    trainer = EmbeddedTrainer("rl.yaml", *model_and_optimizer, increment=args.global_batch_size)

    # Megatron-LM has loaded its own checkpoint; the trainer's state is beside it.
    if args.iteration:
        trainer.load_state_dict(torch.load(f"{args.save}/rl_{args.iteration}.pt", weights_only=False))

    for iteration in range(args.iteration + 1, args.train_iters + 1):
        timers("rl-step", log_level=0).start(barrier=True)
        metrics = trainer.step()
        timers("rl-step").stop()
        print_rank_0(f"iteration {iteration}: reward {metrics['reward/mean']:.4f}")
        timers.log(["rl-step"])

        if iteration % args.save_interval == 0:
            save_checkpoint(iteration, *model_and_optimizer, args.num_floating_point_operations_so_far)
            if args.rank == 0:
                torch.save(trainer.state_dict(), f"{args.save}/rl_{iteration}.pt")
    trainer.close()


if __name__ == "__main__":
    main()
