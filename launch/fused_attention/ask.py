"""Query the real Transformer Engine and cuDNN, without a GPU, for the attention kernels of shipped models.

The tests do not run this script: it downloads about 800 MB of wheels into --folder once, in the versions of
the lock file for GPUs, and compiles two small libraries with gcc. Then

    python launch/fused_attention/ask.py

prints a table in Markdown: the attention heads of each rank by compute capability. The exit code is 1 if the
project's own rule (`megatron_rl.shapes.accelerator`) differs from the libraries.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from megatron_rl.check.configuration import check_config  # noqa: E402
from megatron_rl.config.load import load  # noqa: E402
from megatron_rl.shapes.accelerator import AcceleratedRole  # noqa: E402

LOCK = ROOT / "launch" / "constraints-gpu-py312-vllm0.32.txt"
WHEELS = (
    "transformer-engine-cu13", "nvidia-cudnn-cu13", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime",
    "nvidia-cuda-crt", "nvidia-cublas", "nvidia-nccl-cu13",
)  # fmt: skip
"""Packages with the libraries, and with the headers that interpose.c includes."""
LIBRARY = "transformer_engine/wheel_lib/libtransformer_engine.so"
FOLDERS = ("nvidia/cu13/lib", "nvidia/cudnn/lib", "nvidia/nccl/lib")
"""Folders of the libraries that `LIBRARY` is linked with."""

CAPABILITIES = (80, 90, 100, 103, 120)
"""Compute capabilities x 10 of A100, H100, B200, B300 and Blackwell workstation GPUs."""

_FIELDS = """
    is_training deterministic cuda_graph return_max_logit attn_mask_type bias_type window_size_left
    window_size_right bottom_right_diagonal softmax_type scaling_mode dropout attn_scale qkv_dtype
    o_dtype do_dtype dqkv_dtype qkv_layout o_format do_format dqkv_layout qkv_scale_inv_format
    do_scale_inv_format batch_size num_attn_heads num_gqa_groups head_dim_qk head_dim_v max_seqlen_q
    max_seqlen_kv num_tokens_q num_tokens_kv
"""
"""First attributes of NVTEFusedAttnConfig, in the order of fused_attn.h (2.20.2)."""
_BYTES = {
    "is_training",
    "deterministic",
    "cuda_graph",
    "return_max_logit",
    "bottom_right_diagonal",
}
_LONGS = {"window_size_left", "window_size_right"}
_FLOATS = {"dropout", "attn_scale"}
_ENUMS = {
    "attn_mask_type", "bias_type", "softmax_type", "scaling_mode", "qkv_dtype", "o_dtype", "do_dtype",
    "dqkv_dtype", "qkv_layout", "o_format", "do_format", "dqkv_layout", "qkv_scale_inv_format",
    "do_scale_inv_format",
}  # fmt: skip
# Values of C enumerations in transformer_engine/fused_attn.h of 2.20.2.
_PADDING_CAUSAL = 3  # NVTE_PADDING_CAUSAL_MASK
_BFLOAT16 = 6  # kNVTEBFloat16
_THD_LAYOUT = 14  # NVTE_THD_THD_THD
_THD_FORMAT = 2  # NVTE_THD
_NO_FORMAT = 8
_FUSED_BACKEND = 1  # NVTE_F16_arbitrary_seqlen, the fused kernel for half precision

_NUM_SHORT_ROWS = (40, 300)
"""Numbers of rows that are tried for a micro-batch of short rows."""


class Attention(NamedTuple):
    """Attention of one rank: its heads and the packed rows of a micro-batch."""

    name: str
    """Name of the model with its layout."""
    heads: int
    """Number of query heads."""
    groups: int
    """Number of key-value heads."""
    key_size: int
    """Size of a query or key head."""
    value_size: int
    """Size of a value head."""
    tokens: int
    """Number of tokens of a micro-batch."""
    longest_row: int
    """Maximum number of tokens of a row."""


class ShippedModel(NamedTuple):
    """Model of a shipped configuration: the attention of a rank, the model's shape and its layout."""

    attention: Attention
    shape: Any
    layout: Any


def shipped_models() -> dict[str, ShippedModel]:
    """Return the trained models of the shipped configurations, each combination of model and layout once."""
    # Paths in the configurations are relative to the root of the repository.
    os.chdir(ROOT)
    model_by_name: dict[str, ShippedModel] = {}
    for file in sorted((ROOT / "configs").glob("**/*.yaml")):
        report = check_config(
            load(str(file)),
            without_files=True,
            shipped_models=ROOT / "configs/models",
            patience=0,
        )
        for role, layout in (report.layouts or {}).items():
            shape = report.shapes.get(role, report.shape)
            if role == "rollout" or shape is None or report.batch is None:
                continue
            # Skip attention that Transformer Engine does not compute: with sinks, or in plain layers.
            if shape.needs_plain_layers or shape.sinks:
                continue

            attention = rank_attention(shape, layout, report.batch)
            model_by_name.setdefault(attention.name, ShippedModel(attention, shape, layout))
    return model_by_name


def rank_attention(shape: Any, layout: Any, batch: Any) -> Attention:
    """Return the attention of a rank, whose heads are split over tensor and context parallelism."""
    name = f"{shape.name}, TP{layout.tensor}"
    if layout.context > 1:
        name += f" CP{layout.context}"

    # Each shipped model has one kind of attention. Layers without keys are delta nets.
    (mixer,) = (mixer for mixer in shape.mixers if mixer.key_value_heads(shape))
    num_ranks = layout.tensor * layout.context
    return Attention(
        name,
        heads=shape.heads // num_ranks,
        groups=max(1, mixer.key_value_heads(shape) // num_ranks),
        key_size=mixer.key_size(shape),
        value_size=mixer.value_size(shape),
        tokens=batch.tokens_per_microbatch,
        longest_row=min(batch.longest_row, batch.tokens_per_microbatch),
    )


def unfused_reason(
    library: ctypes.CDLL,
    attention: Attention,
    *,
    training: bool,
    deterministic: bool,
    num_rows: int,
) -> str:
    """Return why the library has no fused kernel for an attention, or "" if it has one."""
    # Rows are padded to a multiple of eight tokens.
    max_tokens = min(attention.longest_row, attention.tokens // num_rows)
    padded_tokens = math.ceil(max_tokens / 8) * 8

    # All other attributes stay zero.
    field_names = _FIELDS.split()
    value_by_field: dict[str, float] = dict.fromkeys(field_names, 0)
    value_by_field |= {
        "is_training": training,
        "deterministic": deterministic,
        "attn_mask_type": _PADDING_CAUSAL,
        "window_size_left": -1,
        "attn_scale": attention.key_size**-0.5,
        "qkv_dtype": _BFLOAT16,
        "o_dtype": _BFLOAT16,
        "do_dtype": _BFLOAT16,
        "dqkv_dtype": _BFLOAT16,
        "qkv_layout": _THD_LAYOUT,
        "dqkv_layout": _THD_LAYOUT,
        "o_format": _THD_FORMAT,
        "do_format": _THD_FORMAT,
        "qkv_scale_inv_format": _NO_FORMAT,
        "do_scale_inv_format": _NO_FORMAT,
        "batch_size": num_rows,
        "num_attn_heads": attention.heads,
        "num_gqa_groups": attention.groups,
        "head_dim_qk": attention.key_size,
        "head_dim_v": attention.value_size,
        "max_seqlen_q": padded_tokens,
        "max_seqlen_kv": padded_tokens,
        "num_tokens_q": attention.tokens,
        "num_tokens_kv": attention.tokens,
    }

    # ctypes would otherwise pass pointers as 32-bit integers.
    library.nvte_create_fused_attn_config.restype = ctypes.c_void_p
    library.nvte_set_fused_attn_config_attribute.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_size_t,
    ]
    library.nvte_get_fused_attn_backend_v2.argtypes = [
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_char_p),
    ]

    config = library.nvte_create_fused_attn_config()
    for index, name in enumerate(field_names):
        value = _c_value(name, value_by_field[name])
        library.nvte_set_fused_attn_config_attribute(
            config,
            index,
            ctypes.byref(value),
            ctypes.sizeof(value),
        )

    message = ctypes.c_char_p()
    backend = library.nvte_get_fused_attn_backend_v2(config, ctypes.byref(message))
    if backend == _FUSED_BACKEND:
        return ""
    return (message.value or b"no reason").decode(errors="replace")


def _c_value(name: str, value: float) -> Any:
    """Convert the value of an attribute to its C type."""
    if name in _BYTES:
        return ctypes.c_uint8(int(value))
    if name in _LONGS:
        return ctypes.c_int64(int(value))
    if name in _FLOATS:
        return ctypes.c_float(value)
    if name in _ENUMS:
        return ctypes.c_int(int(value))
    return ctypes.c_size_t(int(value))


def print_reasons(folder: Path, attentions: list[Attention]) -> None:
    """Print as JSON, for each attention, why it has no fused kernel: by default, and if deterministic."""
    # Transformer Engine uses symbols of this library, so it has to be loaded first.
    ctypes.CDLL("libnvrtc.so.13", mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(folder / LIBRARY), mode=ctypes.RTLD_GLOBAL)

    reasons_by_name: dict[str, list[str]] = {}
    for attention in attentions:
        num_long_rows = max(1, attention.tokens // attention.longest_row)
        reasons_by_name[attention.name] = []
        for deterministic in (False, True):
            # Attention is fused only if it is in training and log-prob passes, with long and with short rows.
            reasons = [
                unfused_reason(
                    library,
                    attention,
                    training=training,
                    deterministic=deterministic,
                    num_rows=num_rows,
                )
                for training in (True, False)
                for num_rows in (num_long_rows, *_NUM_SHORT_ROWS)
            ]
            first_reason = next(filter(None, reasons), "")
            reasons_by_name[attention.name].append(first_reason)
    print(json.dumps(reasons_by_name))


def prepare_libraries(folder: Path) -> dict[str, str]:
    """Download and unpack the wheels and compile two libraries; return the environment that loads them."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = dict(line.split("==") for line in LOCK.read_text().split() if "==" in line)
    # An earlier call may have downloaded and unpacked the libraries.
    if not (folder / LIBRARY).is_file():
        requirements = [f"{name}=={lock[name]}" for name in WHEELS]
        download = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "--dest",
            "wheels",
        ]
        subprocess.run([*download, *requirements], cwd=folder, check=True)
        for wheel in (folder / "wheels").glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(folder)

    # cuDNN looks up the driver's functions by name, so an empty function of each name is enough.
    cudnn = (folder / "nvidia/cudnn/lib/libcudnn_graph.so.9").read_bytes()
    matches = re.findall(rb"(?<![A-Za-z_])cu[A-Z][A-Za-z0-9_]{3,60}(?=\0)", cudnn)
    function_names = sorted({name.decode() for name in matches})
    source = "\n".join(f"int {name}() {{ return 0; }}" for name in function_names)
    (folder / "driver.c").write_text(source, encoding="utf-8")

    compile_library = [
        "gcc",
        "-shared",
        "-fPIC",
        "-w",
        "-I",
        str(folder / "nvidia/cu13/include"),
    ]
    subprocess.run([*compile_library, "driver.c", "-o", "driver.so"], cwd=folder, check=True)
    subprocess.run(
        [*compile_library, str(HERE / "interpose.c"), "-o", "interpose.so", "-ldl"],
        cwd=folder,
        check=True,
    )
    return {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join(str(folder / path) for path in FOLDERS),
        "LD_PRELOAD": str(folder / "interpose.so"),
        "DRIVER_STUB": str(folder / "driver.so"),
    }


def query_libraries(
    folder: Path,
    environment: Mapping[str, str],
    attentions: list[Attention],
    capability: int,
) -> dict[str, list[str]]:
    """Return the reasons of `print_reasons` for GPUs of one compute capability."""
    # Start a separate process, since the libraries read the compute capability only once.
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--answer",
        "--folder",
        str(folder),
    ]
    process = subprocess.run(
        command,
        env={**environment, "CAPABILITY": str(capability)},
        input=json.dumps(attentions).encode(),
        check=True,
        stdout=subprocess.PIPE,
    )
    return json.loads(process.stdout)


def rule_differences(model: ShippedModel, capability: int, reasons: list[str]) -> Iterator[str]:
    """Yield the cases in which the project's rule differs from the libraries, as text.

    ``reasons`` are the two reasons of `print_reasons`: by default, and if deterministic.
    """
    for deterministic, reason in zip((False, True), reasons, strict=True):
        role = AcceleratedRole(
            model.shape,
            model.layout,
            fused=True,
            half_precision=True,
            capability=capability,
            deterministic=deterministic,
        )
        is_fused = not reason
        if (role.attention_kernel == "fused") != is_fused:
            name = model.attention.name
            yield f"{name}, {capability}, deterministic {deterministic}: {reason or 'fused'}"


def main() -> int:
    """Print the table; return 1 if the project's rule differs from the libraries."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/fused_attention"),
        help="where wheels are kept",
    )
    # The script calls itself with this option, in the environment of the libraries.
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    folder = arguments.folder.resolve()
    if arguments.answer:
        attentions = [Attention(*fields) for fields in json.load(sys.stdin)]
        print_reasons(folder, attentions)
        return 0

    environment = prepare_libraries(folder)
    model_by_name = shipped_models()
    attentions = [model.attention for model in model_by_name.values()]
    reasons_by_capability = {
        capability: query_libraries(folder, environment, attentions, capability)
        for capability in CAPABILITIES
    }

    header = ["model of a rank", *(f"{capability / 10:.1f}" for capability in CAPABILITIES)]
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")

    differences: list[str] = []
    for name, model in model_by_name.items():
        cells = []
        for capability in CAPABILITIES:
            reasons = reasons_by_capability[capability][name]
            differences += rule_differences(model, capability, reasons)
            cells.append(_cell(*reasons))

        attention = model.attention
        heads = f"{attention.heads}/{attention.groups} heads of {attention.key_size}"
        if attention.value_size != attention.key_size:
            heads += f"/{attention.value_size}"
        print(f"| {name}: {heads} | {' | '.join(cells)} |")

    for difference in differences:
        print(f"the rule of megatron_rl.shapes.accelerator differs: {difference}", file=sys.stderr)
    return int(bool(differences))


def _cell(default_reason: str, deterministic_reason: str) -> str:
    """Format a table cell: whether a kernel is fused by default, and if deterministic."""
    if default_reason:
        return "–"
    if deterministic_reason:
        return "fused, not deterministic"
    return "fused"


if __name__ == "__main__":
    sys.exit(main())
