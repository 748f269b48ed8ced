"""The ranks of a job: devices, process groups, and the exchange between ranks."""

import warnings

# Megatron-Core warns of each optional package that is absent, once per module and rank, on import.
warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine|absl).*")
