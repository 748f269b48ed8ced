"""Extract the signatures that the stand-in shares with Transformer Engine from its sources, unexecuted.

pip download --no-deps transformer_engine==2.20.2 && unzip transformer_engine-2.20.2-*.whl -d wheel
python tests/te_standin/signatures.py wheel > tests/te_standin/signatures.json
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

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
    """Return the arguments and defaults, without types, of `NAMES` in a folder with the package."""
    signatures_by_name = {}
    for file, functions in NAMES.items():
        tree = ast.parse((folder / "transformer_engine" / file).read_text())
        for name in functions:
            owner, _, method = name.rpartition(".")
            body = tree.body
            if owner:
                (body,) = (
                    node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner
                )
            (function,) = (node for node in body if isinstance(node, ast.FunctionDef) and node.name == method)
            arguments = function.args
            listed = [
                *arguments.posonlyargs,
                *arguments.args,
                *arguments.kwonlyargs,
            ]
            for argument in (*listed, arguments.vararg, arguments.kwarg):
                if argument is not None:
                    argument.annotation = None
            signatures_by_name[f"{file}:{name}"] = ast.unparse(arguments)
    return signatures_by_name


if __name__ == "__main__":
    print(json.dumps(signatures(Path(sys.argv[1])), indent=2))
