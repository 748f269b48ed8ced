"""Policy losses: their form in `policy_loss`, and the losses by family."""
