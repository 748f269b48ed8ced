"""Ask the real Transformer Engine and cuDNN, without a GPU, which shipped configurations get fused attention.

A job of its own, not part of the tests: it downloads about 800 MB of wheels into --folder once, in the
versions of the lock for GPUs, and compiles two small libraries with gcc. Then

    python launch/fused_attention/ask.py

prints a table in Markdown: model and heads of a rank by compute capability. It fails where the project's own
rule (`megatron_rl.shapes.accelerator`) takes a kernel that the libraries do not have, or leaves one that they
have.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
import zipfile
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
"""Packages with the libraries, and the headers that the interposer is compiled with."""
LIBRARY = "transformer_engine/wheel_lib/libtransformer_engine.so"
FOLDERS = ("nvidia/cu13/lib", "nvidia/cudnn/lib", "nvidia/nccl/lib")
"""Folders of the libraries that Transformer Engine's needs."""

CAPABILITIES = (80, 90, 100, 103, 120)
"""Compute capabilities x 10: A100, H100, B200, B300, and workstations of Blackwell."""

_FIELDS = """
    is_training deterministic cuda_graph return_max_logit attn_mask_type bias_type window_size_left
    window_size_right bottom_right_diagonal softmax_type scaling_mode dropout attn_scale qkv_dtype
    o_dtype do_dtype dqkv_dtype qkv_layout o_format do_format dqkv_layout qkv_scale_inv_format
    do_scale_inv_format batch_size num_attn_heads num_gqa_groups head_dim_qk head_dim_v max_seqlen_q
    max_seqlen_kv num_tokens_q num_tokens_kv
"""
"""Attributes of NVTEFusedAttnConfig in their order (fused_attn.h of 2.20.2), as far as they are set here."""
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
_PADDING_CAUSAL, _BFLOAT16, _ROWS_LAYOUT, _ROWS_FORMAT, _NO_FORMAT = (
    3,
    6,
    14,
    2,
    8,
)
_ANY_LENGTH_BACKEND = 1
"""Numbers of NVTE_PADDING_CAUSAL_MASK, kNVTEBFloat16, NVTE_THD_THD_THD, NVTE_THD, no format, and of
NVTE_F16_arbitrary_seqlen, the fused kernel for half precision."""


class Question(NamedTuple):
    """Attention of one rank: its heads and the packed rows of a micro-batch."""

    name: str
    heads: int
    groups: int
    key_size: int
    value_size: int
    tokens: int
    longest_row: int


def questions() -> dict[str, tuple[Question, Any, Any]]:
    """Return a question, the shape and the layout of each model in the shipped configurations."""
    asked: dict[str, tuple[Question, Any, Any]] = {}
    for file in sorted((ROOT / "configs").glob("**/*.yaml")):
        os.chdir(ROOT)
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
            # These models have attention of this package, or of PyTorch.
            if shape.plain_layers or shape.sinks:
                continue
            ranks = layout.tensor * layout.context
            # Each shipped model has one kind of attention, some beside delta nets, which have no keys.
            (attention,) = (mixer for mixer in shape.mixers if mixer.key_value_heads(shape))
            question = Question(
                f"{shape.name}, TP{layout.tensor}" + (f" CP{layout.context}" if layout.context > 1 else ""),
                shape.heads // ranks,
                max(1, attention.key_value_heads(shape) // ranks),
                attention.key_size(shape),
                attention.value_size(shape),
                report.batch.tokens_per_microbatch,
                min(report.batch.longest_row, report.batch.tokens_per_microbatch),
            )
            asked.setdefault(question.name, (question, shape, layout))
    return asked


def verdict(
    library: ctypes.CDLL,
    question: Question,
    *,
    training: bool,
    deterministic: bool,
    rows: int,
) -> str:
    """Return "" if the library has a fused kernel for the question, else its reason."""
    fields = _FIELDS.split()
    longest = -(-min(question.longest_row, question.tokens // rows) // 8) * 8
    values: dict[str, float] = dict.fromkeys(fields, 0)
    values |= {
        "is_training": training,
        "deterministic": deterministic,
        "attn_mask_type": _PADDING_CAUSAL,
        "window_size_left": -1,
        "attn_scale": question.key_size**-0.5,
        **dict.fromkeys(("qkv_dtype", "o_dtype", "do_dtype", "dqkv_dtype"), _BFLOAT16),
        **dict.fromkeys(("qkv_layout", "dqkv_layout"), _ROWS_LAYOUT),
        **dict.fromkeys(("o_format", "do_format"), _ROWS_FORMAT),
        **dict.fromkeys(("qkv_scale_inv_format", "do_scale_inv_format"), _NO_FORMAT),
        "batch_size": rows,
        "num_attn_heads": question.heads,
        "num_gqa_groups": question.groups,
        "head_dim_qk": question.key_size,
        "head_dim_v": question.value_size,
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), longest),
        **dict.fromkeys(("num_tokens_q", "num_tokens_kv"), question.tokens),
    }

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
    for index, name in enumerate(fields):
        value = _c_value(name, values[name])
        library.nvte_set_fused_attn_config_attribute(config, index, ctypes.byref(value), ctypes.sizeof(value))

    message = ctypes.c_char_p()
    backend = library.nvte_get_fused_attn_backend_v2(config, ctypes.byref(message))
    if backend == _ANY_LENGTH_BACKEND:
        return ""
    return (message.value or b"no reason").decode(errors="replace")


def _c_value(name: str, value: float) -> Any:
    if name in _BYTES:
        return ctypes.c_uint8(int(value))
    if name in _LONGS:
        return ctypes.c_int64(int(value))
    if name in _FLOATS:
        return ctypes.c_float(value)
    if name in _ENUMS:
        return ctypes.c_int(int(value))
    return ctypes.c_size_t(int(value))


def answer(folder: Path, asked: list[Question]) -> None:
    """Print the verdicts of one capability as JSON: question -> [by default, deterministic]."""
    ctypes.CDLL("libnvrtc.so.13", mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(folder / LIBRARY), mode=ctypes.RTLD_GLOBAL)
    answers: dict[str, list[str]] = {}
    for question in asked:
        answers[question.name] = []
        for deterministic in (False, True):
            reasons = []
            for training in (True, False):
                # A few long rows, and many short ones.
                for rows in (
                    max(1, question.tokens // question.longest_row),
                    40,
                    300,
                ):
                    reasons.append(
                        verdict(
                            library,
                            question,
                            training=training,
                            deterministic=deterministic,
                            rows=rows,
                        )
                    )
            answers[question.name].append(next(filter(None, reasons), ""))
    print(json.dumps(answers))


def prepare(folder: Path) -> dict[str, str]:
    """Download and unpack the wheels and compile the two libraries; return the environment to ask in."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = dict(line.split("==") for line in LOCK.read_text().split() if "==" in line)
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

    # cuDNN looks up the functions of the driver and calls none that matters here.
    graph = (folder / "nvidia/cudnn/lib/libcudnn_graph.so.9").read_bytes()
    names = sorted(
        {name.decode() for name in re.findall(rb"(?<![A-Za-z_])cu[A-Z][A-Za-z0-9_]{3,60}(?=\0)", graph)}
    )
    stub = "\n".join(f"int {name}() {{ return 0; }}" for name in names)
    (folder / "driver.c").write_text(stub, encoding="utf-8")
    shared = [
        "gcc",
        "-shared",
        "-fPIC",
        "-w",
        "-I",
        str(folder / "nvidia/cu13/include"),
    ]
    subprocess.run([*shared, "driver.c", "-o", "driver.so"], cwd=folder, check=True)
    subprocess.run(
        [*shared, str(HERE / "interpose.c"), "-o", "interpose.so", "-ldl"],
        cwd=folder,
        check=True,
    )
    return {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join(str(folder / path) for path in FOLDERS),
        "LD_PRELOAD": str(folder / "interpose.so"),
        "DRIVER_STUB": str(folder / "driver.so"),
    }


def main() -> int:
    """Print the table; the exit code is 1 where the project's rule differs from the libraries."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/fused_attention"),
        help="where wheels are kept",
    )
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if arguments.answer:
        answer(folder, [Question(*fields) for fields in json.load(sys.stdin)])
        return 0

    environment = prepare(folder)
    asked = questions()
    request = json.dumps([question for question, _, _ in asked.values()])
    answers: dict[int, dict[str, list[str]]] = {}
    for capability in CAPABILITIES:
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--answer",
            "--folder",
            str(folder),
        ]
        output = subprocess.run(
            command,
            env={**environment, "CAPABILITY": str(capability)},
            input=request.encode(),
            check=True,
            stdout=subprocess.PIPE,
        )
        answers[capability] = json.loads(output.stdout)

    header = [
        "model of a rank",
        *(f"{capability / 10:.1f}" for capability in CAPABILITIES),
    ]
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    differences = []
    for name, (question, shape, layout) in asked.items():
        cells = []
        for capability in CAPABILITIES:
            reasons = answers[capability][name]
            for deterministic, reason in zip((False, True), reasons, strict=True):
                role = AcceleratedRole(
                    shape,
                    layout,
                    fused=True,
                    half_precision=True,
                    capability=capability,
                    deterministic=deterministic,
                )
                if (role.attention_kernel == "fused") != (not reason):
                    differences.append(
                        f"{name}, {capability}, deterministic {deterministic}: {reason or 'fused'}"
                    )
            cells.append(_cell(*reasons))
        heads = f"{question.heads}/{question.groups} heads of {question.key_size}"
        if question.value_size != question.key_size:
            heads += f"/{question.value_size}"
        print(f"| {name}: {heads} | {' | '.join(cells)} |")
    for difference in differences:
        print(
            f"the rule of megatron_rl.shapes.accelerator differs: {difference}",
            file=sys.stderr,
        )
    return int(bool(differences))


def _cell(by_default: str, deterministic: str) -> str:
    if by_default:
        return "–"
    return "fused, not deterministic" if deterministic else "fused"


if __name__ == "__main__":
    sys.exit(main())
