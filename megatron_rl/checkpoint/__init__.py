import megatron_rl.distributed  # noqa: F401 - prepares the import of Megatron-Core
