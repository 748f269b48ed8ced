"""Extract the signatures that the stand-in shares with Transformer Engine from its sources.

pip download --no-deps transformer_engine==2.20.2 && unzip transformer_engine-2.20.2-*.whl -d wheel
python tests/te_standin/signatures.py wheel > tests/te_standin/signatures.json

The sources are parsed and not imported, since an import of the real package needs its compiled library.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

# Megatron-Core's layers call these functions, or override them with the same arguments.
NAMES = {
    "pytorch/module/linear.py": ("Linear.__init__", "Linear.forward"),
    "pytorch/module/layernorm_linear.py": (
        "LayerNormLinear.__init__",
        "LayerNormLinear.forward",
    ),
    "pytorch/module/grouped_linear.py": (
        "GroupedLinear.__init__",
        "GroupedLinear.forward",
    ),
    "pytorch/module/layernorm.py": ("LayerNorm.__init__",),
    "pytorch/module/rmsnorm.py": ("RMSNorm.__init__",),
    "pytorch/attention/dot_product_attention/dot_product_attention.py": (
        "DotProductAttention.__init__",
        "DotProductAttention.forward",
    ),
    "pytorch/attention/rope.py": ("apply_rotary_pos_emb",),
    "pytorch/module/base.py": (
        "TransformerEngineBaseModule.set_tensor_parallel_group",
        "TransformerEngineBaseModule.init_fp8_metadata",
        "TransformerEngineBaseModule.get_extra_state",
        "TransformerEngineBaseModule.set_extra_state",
        "TransformerEngineBaseModule.backward_dw",
    ),
    "pytorch/optimizers/fused_adam.py": (
        "FusedAdam.__init__",
        "FusedAdam.step",
    ),
    "pytorch/optimizers/fused_sgd.py": ("FusedSGD.__init__",),
    "pytorch/optimizers/multi_tensor_apply.py": (
        "MultiTensorApply.__init__",
        "MultiTensorApply.__call__",
    ),
}
"""File of the package -> functions whose signatures are compared."""


def signatures(folder: Path) -> dict[str, str]:
    """Return the signature of each function in `NAMES`, without types, from the package in ``folder``."""
    # The key has the file, since two modules may have a function of one name.
    signature_by_name = {}
    for file, names in NAMES.items():
        tree = ast.parse((folder / "transformer_engine" / file).read_text())
        for name in names:
            arguments = _function(tree, name).args
            # Types differ between versions of Python and do not change how a function is called.
            for argument in ast.walk(arguments):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
            signature_by_name[f"{file}:{name}"] = ast.unparse(arguments)
    return signature_by_name


def _function(tree: ast.Module, name: str) -> ast.FunctionDef:
    """Return the syntax tree of a function, or of a method named ``Class.method``."""
    class_name, _, function_name = name.rpartition(".")
    # A method is a statement of its class, a function one of the module.
    statements = tree.body
    if class_name:
        classes = {node.name: node for node in statements if isinstance(node, ast.ClassDef)}
        statements = classes[class_name].body

    functions = {node.name: node for node in statements if isinstance(node, ast.FunctionDef)}
    return functions[function_name]


if __name__ == "__main__":
    print(json.dumps(signatures(Path(sys.argv[1])), indent=2))
