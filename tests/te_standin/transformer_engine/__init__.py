"""Stand-in of Transformer Engine: the classes that Megatron-Core's layers derive from, in torch.

It is found through the module path alone: put ``tests/te_standin`` on PYTHONPATH. Its classes have the
signatures of the real package (``signatures.json``) and compute what it documents, on the host in torch.
Missing parts (8-bit formats, fused optional kernels, graphs) raise an error or cannot be imported.
"""

from transformer_engine import common, pytorch

__version__ = "2.20.2"
__all__ = ["common", "pytorch"]
