#!/usr/bin/env bash
# Make .venv and install what megatron_rl needs. Does nothing, quickly, when that is done already.
#
#   launch/setup.sh [--dev] [--cpu | --gpu] [--cuda 12] [--vllm 0.33]
#
#   --dev         also the tools of launch/test.sh and launch/lint.sh
#   --cpu, --gpu  overrule the detection (a GPU machine is one where nvidia-smi lists a GPU)
#   --cuda 12     the GPU stack for drivers 525 to 579, which cannot run CUDA 13
#   --vllm 0.33   the GPU stack with vLLM 0.33 and torch 2.14 instead of 0.32 and 2.13; on Python 3.12
#   PYTHON=…      the interpreter that .venv is made with (default: the first of python3.12, python3.11,
#                 python3, on PATH or among pyenv's, that is 3.11 or newer and can make environments)
#   VENV=…        the environment's folder instead of .venv
#
# Python 3.12 gets Megatron-Core 0.19, Python 3.11 the last version that supports it, 0.16.1.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"

dev=no
device=""
cuda=13
vllm=0.32
while [ $# -gt 0 ]; do
    case "$1" in
        --dev) dev=yes ;;
        --cpu) device=cpu ;;
        --gpu) device=gpu ;;
        --cuda)
            shift
            cuda="${1:-}"
            if [ "$cuda" != 12 ] && [ "$cuda" != 13 ]; then echo "setup: --cuda is 12 or 13" >&2; exit 2; fi ;;
        --vllm)
            shift
            vllm="${1:-}"
            if [ "$vllm" != 0.32 ] && [ "$vllm" != 0.33 ]; then echo "setup: --vllm is 0.32 or 0.33" >&2; exit 2; fi ;;
        *) echo "setup: unknown argument $1 (known: --dev --cpu --gpu --cuda 12 --vllm 0.33)" >&2; exit 2 ;;
    esac
    shift
done
if [ "$cuda" = 12 ] && [ "$vllm" != 0.32 ]; then
    echo "setup: --cuda 12 goes with vLLM 0.32, whose wheel for CUDA 12 is known" >&2
    exit 2
fi
if [ -z "$device" ]; then
    device=cpu
    if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then device=gpu; fi
fi

venv="${VENV:-$root/.venv}"
python="$venv/bin/python"
say() { echo "setup: $*" >&2; }
fail() { # what is wrong / expected / got / fix, one line each
    printf 'setup: %s\n' "$1" >&2; shift
    printf '  %s\n' "$@" >&2
    exit 1
}

# One set-up at a time in one checkout.
if command -v flock >/dev/null; then
    exec 9>"$root/.venv.lock"
    flock 9
fi

usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local name candidate
    for name in ${PYTHON:-python3.12 python3.11 python3}; do
        # pyenv's shims refuse a version that is not chosen, so its own interpreters are candidates, too.
        for candidate in "$name" "${PYENV_ROOT:-$HOME/.pyenv}/versions/${name#python}".*/bin/"$name"; do
            if command -v "$candidate" >/dev/null && usable "$candidate"; then echo "$candidate"; return; fi
        done
    done
    fail "no usable Python" \
        "expected: Python 3.11 or newer with the venv and ensurepip modules" \
        "got: ${PYTHON:-$(python3 --version 2>/dev/null || echo 'no python3')} on PATH" \
        "fix: install Python 3.12 (and python3.12-venv on Debian or Ubuntu), or set PYTHON=/path/to/python3.12"
}

make_venv() {
    local interpreter
    if [ -e "$venv" ] && usable "$python" && "$python" -m pip --version >/dev/null 2>&1; then return; fi
    interpreter="$(find_python)"
    if [ -e "$venv" ]; then say "replacing $venv: its Python does not run or is too old"; fi
    # On a GPU machine the environment sees the system's packages, so that a container's own builds of
    # torch, Transformer Engine and Apex are used.
    if [ "$device" = gpu ]; then
        "$interpreter" -m venv --clear --system-site-packages "$venv"
    else
        "$interpreter" -m venv --clear "$venv"
    fi
    say "made $venv with $("$python" --version)"
}

# Compiling every module of these packages costs a minute of processor time; most of them are never imported.
pip_install() { "$python" -m pip install -qq --no-compile --disable-pip-version-check "$@"; }

install_cpu() {
    local lock=launch/requirements-cpu.txt torch
    torch="$(grep '^torch==' "$lock")"
    if [ "$(uname -sm)" != "Linux x86_64" ]; then
        fail "the CPU lock file does not fit this machine" \
            "expected: Linux x86_64" "got: $(uname -sm)" "fix: use an x86_64 Linux machine or container"
    fi
    say "installing the CPU stack of $lock (2 to 10 minutes the first time)"
    if ! pip_install --no-deps "$torch" 2>"$venv/torch.log"; then
        say "$torch is not on the configured package index; trying PyTorch's CPU index"
        pip_install --no-deps --extra-index-url https://download.pytorch.org/whl/cpu "$torch" 2>>"$venv/torch.log" ||
            cuda_build "${torch%+cpu}" || {
            cat "$venv/torch.log" >&2
            fail "could not install $torch" \
                "expected: a wheel for $("$python" --version) on Linux x86_64" \
                "got: neither a CPU nor a CUDA build from the configured index or PyTorch's CPU index (above)" \
                "fix: make one of them reachable, or put the wheel into a folder and set PIP_FIND_LINKS to it"
        }
    fi
    rm -f "$venv/torch.log"
    grep -v '^torch==' "$lock" >"$venv/lock.txt"
    pip_install --no-deps -r "$venv/lock.txt" || fail "could not install $lock" \
        "expected: every package of it on the configured index, at that version" \
        "got: pip's message above, which names the first one missing" \
        "fix: check the network and 'pip config list'; a missing wheel can be put where PIP_FIND_LINKS points"
    drop_cuda_builds
    check_cpu
}

# It runs on CPUs as well, and is what an index without PyTorch's own wheels has.
cuda_build() {
    say "taking the CUDA build of $1, with NVIDIA's libraries (5 GB)"
    pip_install "$1" 2>>"$venv/torch.log"
}

# These are compiled for one torch each; the index has them only for CUDA, and beside CPU torch they break
# `import transformers` and `import vllm`. A CUDA build of torch needs triton and NVIDIA's libraries to import.
drop_cuda_builds() {
    local found
    found="$("$python" - <<'EOF'
from importlib.metadata import distributions, version
names = {(d.metadata["Name"] or "").lower() for d in distributions()}
bad = {"torchvision", "torchaudio", "torchcodec", "vllm", "xformers", "flash-attn"}
if "+cpu" in version("torch"):
    bad |= {n for n in names if n == "triton" or n.startswith(("nvidia-", "nvidia_"))}
print(*sorted(names & bad))
EOF
)"
    if [ -n "$found" ]; then
        say "removing CUDA builds that do not go with this torch: $found"
        # shellcheck disable=SC2086
        "$python" -m pip uninstall -qq -y $found
    fi
}

# The real imports: they find what is missing, and compile once what every rank will load. What the packages
# print about missing GPUs is shown only beside an error.
check_cpu() {
    env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 VLLM_LOGGING_LEVEL=ERROR \
        "$python" -W ignore - 2>"$venv/import.log" <<'EOF' || {
import megatron.core.models.gpt
import transformers
from vllm import LLM
EOF
        cat "$venv/import.log" >&2
        fail "the installed stack does not import" \
            "expected: torch, megatron.core, transformers and vllm" \
            "got: the message above" "fix: rm -rf $venv, then run launch/setup.sh again"
    }
    rm -f "$venv/import.log"
}

# The GPU stack at one version each, as pip resolved it: launch/constraints-gpu-py312-vllm0.32.txt and its like.
gpu_lock() {
    local lock
    lock="launch/$("$python" -c 'import sys; print("constraints-gpu-py%d%d" % sys.version_info[:2])')-vllm$vllm.txt"
    if [ ! -f "$lock" ]; then
        fail "there is no lock of the GPU stack with vLLM $vllm for $("$python" --version)" \
            "expected: one of $(cd launch; echo constraints-gpu-*)" "got: no $lock" \
            "fix: set PYTHON to Python 3.12 (with vLLM 0.32 3.11 is possible, too), and remove $venv"
    fi
    echo "$lock"
}

# torch and vLLM for CUDA 12, from their own indexes: the package index has those for CUDA 13.
install_cuda_12() { # lock
    local torch vllm te
    torch="$(grep '^torch==' "$1")"
    vllm="$(sed -n 's/^vllm==//p' "$1")"
    te="$(sed -n 's/^transformer-engine==//p' "$1")"
    pip_install --extra-index-url https://download.pytorch.org/whl/cu129 "$torch+cu129" &&
        pip_install --no-deps "https://github.com/vllm-project/vllm/releases/download/v$vllm/vllm-$vllm+cu129-cp38-abi3-manylinux_2_35_$(uname -m).whl" &&
        pip_install --no-deps "transformer_engine_cu12==$te"
}

has_transformer_engine() {
    "$python" -c 'import sys; from megatron_rl.config.derive import has_transformer_engine as has; sys.exit(not has())'
}

# Looked for before anything is downloaded: what compiles Transformer Engine.
check_compiler() {
    local header
    if has_transformer_engine; then return; fi
    header="$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h"
    if ! command -v g++ >/dev/null || [ ! -f "$header" ]; then
        fail "Transformer Engine cannot be compiled here; nothing was downloaded" \
            "expected: a C++17 compiler (g++) on PATH, and $header" \
            "got: $(command -v g++ || echo 'no g++'); $(ls "$header" 2>/dev/null || echo "no Python.h")" \
            "fix: apt-get install g++ python3-dev (that of $("$python" --version)), or use an image with Transformer Engine (launch/Dockerfile)"
    fi
}

# Print the folders with CUDA's headers, separated by colons: those of NVIDIA's wheels in .venv and among the
# system's packages (Transformer Engine's own search takes one of the two), then those of a toolkit.
cuda_headers() {
    "$python" - "$venv/headers" "${CUDA_HOME:-/usr/local/cuda}" <<'EOF'
import sys
from importlib.util import find_spec
from pathlib import Path

wheels = find_spec("nvidia")
installed = (wheels and wheels.submodule_search_locations) or ()
roots = [Path(sys.argv[1]) / "nvidia", *map(Path, installed)]
folders = [folder for root in roots for folder in sorted(root.glob("*/include"))]
toolkit = Path(sys.argv[2]) / "include"
print(":".join(map(str, [*folders, *([toolkit] if toolkit.is_dir() else [])])))
EOF
}

compiles_with() { # folders
    printf '#include <%s>\n' cuda_runtime.h cuda_bf16.h cublasLt.h cudnn.h cusolverDn.h cusparse.h nccl.h nvrtc.h |
        CPLUS_INCLUDE_PATH="$1" g++ -std=c++17 -fsyntax-only -x c++ -
}

# A container's torch comes without the headers of CUDA's compiler (crt, nv/target), which other headers include.
fetch_cuda_headers() {
    local release wheels="nvidia-cuda-crt nvidia-cuda-cccl"
    release="$("$python" -c 'import torch; print(torch.version.cuda)')"
    case "$release" in 12.*) wheels="nvidia-cuda-nvcc-cu12 nvidia-cuda-cccl-cu12" ;; esac
    say "fetching headers of CUDA $release"
    # shellcheck disable=SC2086
    pip_install --no-deps --target "$venv/headers" $(printf "%s==$release.* " $wheels)
    compiles_with "$(cuda_headers)" || fail "headers of CUDA are missing" \
        "expected: those of CUDA $release, cuDNN and NCCL, in NVIDIA's wheels or in a toolkit at CUDA_HOME" \
        "got: the compiler's message above" \
        "fix: install a CUDA $release toolkit with cuDNN and NCCL, set CUDA_HOME, and run launch/setup.sh --gpu again"
}

# Transformer Engine's torch part comes as source and has to be compiled against the installed torch
# (`--no-build-isolation`; isolated, pip would compile against the newest torch, whose ABI is another).
install_transformer_engine() { # lock
    local wanted headers wheels=0
    if has_transformer_engine && "$python" -c 'import transformer_engine.pytorch' 2>/dev/null; then return; fi
    wanted="transformer_engine_torch==$(sed -n 's/^transformer-engine==//p' "$1")"
    compiles_with "$(cuda_headers)" 2>/dev/null || fetch_cuda_headers
    headers="$(cuda_headers)"
    # Its build stops where it is told to use NVIDIA's wheels and there are none.
    case "$headers" in */nvidia/*) wheels=1 ;; esac

    say "compiling $wanted against the installed torch (10 to 30 minutes, once)"
    CPLUS_INCLUDE_PATH="$headers" NVTE_BUILD_USE_NVIDIA_WHEELS="$wheels" MAX_JOBS="${MAX_JOBS:-$(nproc)}" \
        pip_install --no-deps --no-build-isolation "$wanted" || fail "could not compile $wanted" \
        "expected: an extension for torch $("$python" -c 'import torch; print(torch.__version__)')" \
        "got: the compiler's message above" \
        "fix: mend what it names and run launch/setup.sh --gpu again, or use an image with Transformer Engine (launch/Dockerfile)"
    rm -rf "$venv/headers"
}

self_test_gpu() {
    "$python" - <<'EOF'
import importlib.util
import shutil
import sys

import torch
import megatron.core
import transformer_engine.pytorch as te
import vllm

print(f"setup: torch {torch.__version__}, {torch.cuda.device_count()} GPU(s)", file=sys.stderr)
print(f"setup: vllm {vllm.__version__}, megatron-core {megatron.core.__version__}", file=sys.stderr)
if importlib.util.find_spec("apex") is None:
    print("setup: without Apex, which Transformer Engine replaces here", file=sys.stderr)
if shutil.which("nvidia-smi") is None:  # an image is built without its GPUs
    sys.exit(print("setup: no GPU here: run launch/setup.sh --gpu again where there is one", file=sys.stderr))
if not torch.cuda.is_available():
    sys.exit("setup: this torch sees no GPU; fix: install a CUDA build that fits the driver (nvidia-smi)")

layer = te.Linear(64, 64, params_dtype=torch.bfloat16, device="cuda")
total = layer(torch.ones(8, 64, dtype=torch.bfloat16, device="cuda")).sum()
total.backward()
torch.cuda.synchronize()
print("setup: a layer of Transformer Engine has run forward and backward", file=sys.stderr)
EOF
}

install_gpu() {
    local wanted="$venv/gpu.txt" lock
    lock="$(gpu_lock)"
    # What a container brings was built together: it stays, and $wanted has the lines of the lock that it lacks.
    "$python" -m megatron_rl doctor --before-install "$wanted" --lock "$lock" --cuda "$cuda" >&2 || fail \
        "this machine does not go with the GPU stack; nothing was downloaded" \
        "expected: a driver for CUDA $cuda; none of torch, vllm, Transformer Engine and Apex, or builds that fit" \
        "got: the lines above" "fix: as said above"

    check_compiler
    say "installing the GPU stack of $lock for CUDA $cuda (about 8 GB)"
    pip_install --no-deps -r "$wanted" || fail "could not install the packages of $lock" \
        "expected: every package of it on the configured index, at that version" \
        "got: pip's message above, which names the first one missing" \
        "fix: check the network and 'pip config list'; a missing wheel can be put where PIP_FIND_LINKS points"
    if [ "$cuda" = 12 ] && ! "$python" -c 'import torch' 2>/dev/null; then
        install_cuda_12 "$lock" || fail "could not install torch and vLLM for CUDA 12" \
            "expected: their wheels for CUDA 12.9 on PyTorch's index and among vLLM's releases" \
            "got: pip's message above" "fix: update the driver to 580 or later, and run launch/setup.sh --gpu"
    fi
    install_transformer_engine "$lock"
    pip_install --no-deps --no-build-isolation -e . || fail "could not install megatron_rl itself" \
        "expected: an editable install of $root" "got: pip's message above" \
        "fix: rm -rf $venv, then run launch/setup.sh again"

    "$python" -m megatron_rl doctor --quick >&2 || fail "the installed stack does not fit together" \
        "expected: no FAIL in what doctor says" "got: the lines above" \
        "fix: rm -rf $venv, mend what is said, then run launch/setup.sh again"
    self_test_gpu || fail "the installed stack does not run" \
        "expected: a layer of Transformer Engine on a GPU" "got: the message above" \
        "fix: launch/setup.sh says what is installed; docs/install.md has the usual causes"
}

# The stamp says what was installed, for which Python and at which path; anything else installs again.
stamp() { # name, files
    local name="$1"; shift
    { echo "$name $device $root"; "$python" --version; cat "$@"; } 2>/dev/null | sha256sum | cut -d' ' -f1
}
done_already() { [ -f "$venv/.installed-$1" ] && [ "$(cat "$venv/.installed-$1")" = "$2" ]; }

make_venv
if [ "$device" = gpu ]; then
    now="$(stamp "gpu$cuda" setup.py "$(gpu_lock)")"
    if ! done_already gpu "$now"; then
        install_gpu
        echo "$now" >"$venv/.installed-gpu"
        say "done: $venv"
    fi
else
    now="$(stamp cpu launch/requirements-cpu.txt setup.py)"
    if ! done_already cpu "$now"; then
        install_cpu
        # The project itself, in place; the lock file brings the setuptools that builds it.
        pip_install --no-deps --no-build-isolation -e . || fail "could not install megatron_rl itself" \
            "expected: an editable install of $root" "got: pip's message above" \
            "fix: rm -rf $venv, then run launch/setup.sh again"
        echo "$now" >"$venv/.installed-cpu"
        say "done: $venv"
    fi
fi
# A script that runs something afterwards says itself what is next.
if [ -z "${CALLED_BY:-}" ] && [ "$dev" = no ]; then
    say "next: source $(basename "$venv")/bin/activate; megatron-rl doctor; launch/quickstart.sh"
fi
if [ "$dev" = yes ]; then
    now="$(stamp dev launch/requirements-dev.txt)"
    if ! done_already dev "$now"; then
        say "installing the check tools of launch/requirements-dev.txt"
        pip_install --no-deps -r launch/requirements-dev.txt || fail "could not install the check tools" \
            "expected: every package of launch/requirements-dev.txt on the configured index" \
            "got: pip's message above" "fix: check the network and 'pip config list'"
        echo "$now" >"$venv/.installed-dev"
    fi
fi
