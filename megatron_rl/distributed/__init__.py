"""Devices, process groups, and communication between the ranks of a job."""

import logging
import warnings

from megatron_rl.distributed.cudnn import load_cudnn_of_torch

# Megatron-Core warns of each optional package that is absent, once per module and rank, on import.
warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine|absl).*")
# A CUDA build of torch on a machine without a GPU logs in each process that it finds no CUDA runtime.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
# vLLM logs that Triton has no backend for hosts.
logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
# This must precede the first import of Megatron-Core, which imports Transformer Engine. The packages
# `checkpoint` and `megatron` therefore import this package first.
load_cudnn_of_torch()
