"""Transformer Engine for the host: the classes that Megatron-Core's layers derive from, in plain torch.

Put ``tests/te_standin`` on PYTHONPATH to import it in place of the real package. The classes have the real
signatures (``signatures.json``) and the documented results. Features without a stand-in (8-bit formats,
optional fused kernels, graphs) raise an error or cannot be imported.
"""

from transformer_engine import common, pytorch

# Megatron-Core enables features by this version.
__version__ = "2.20.2"
__all__ = ["common", "pytorch"]
