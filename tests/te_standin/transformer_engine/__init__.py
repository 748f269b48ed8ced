"""Stand where Transformer Engine lies on a GPU machine: the classes that Megatron-Core builds on, in torch.

Found through the module path alone: put ``tests/te_standin`` on PYTHONPATH. What is here has the signatures
of the real package (``signatures.json``) and computes what it documents, on the host and in plain torch.
What is not here (8-bit formats, fused optional kernels, graphs) raises or cannot be imported.
"""

from transformer_engine import common, pytorch

__version__ = "2.20.2"
__all__ = ["common", "pytorch"]
