"""Files and environment variables that are visible to sandboxed code; all others are hidden.

A path is visible if the interpreter needs it (its installation, folders of modules, libraries of the system),
if the code is in it, or if ``limits.read`` names it. In a shared folder (`/`, `/tmp`, a home) only Python
files and packages are visible: a run may be started in such a folder, which may also contain a user's keys.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron_rl.redaction import is_secret

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/sys/devices/system")
"""Programs and libraries, and the descriptions of processors and memory that numerical libraries read."""
SETTINGS = (
    "alternatives",
    "fonts",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "nsswitch.conf",
    "os-release",
    "protocols",
    "services",
    "timezone",
)
"""Files of /etc that programs need and that contain no data of users."""
NETWORK_SETTINGS = (
    "ca-certificates",
    "gai.conf",
    "host.conf",
    "hosts",
    "pki/ca-trust/extracted",
    "pki/tls/cert.pem",
    "pki/tls/certs",
    "resolv.conf",
    "ssl/cert.pem",
    "ssl/certs",
    "ssl/openssl.cnf",
)
"""Files of /etc that name resolution and TLS need."""
DEVICES = ("null", "zero", "full", "random", "urandom")
"""Devices in /dev that sandboxed code may open."""

_SHARED_FOLDERS = frozenset(
    {
        *("/", "/boot", "/dev", "/etc", "/home", "/media", "/mnt", "/opt", "/proc", "/root", "/run"),
        *("/srv", "/sys", "/tmp", "/var", "/var/tmp"),
    }
)
"""Folders that contain files of several programs or users, in addition to the homes of users."""
_MAX_LINKS = 40
"""Largest number of symbolic links that the kernel follows in one path."""

VARIABLES = frozenset(
    {
        *("HOME", "LANG", "LANGUAGE", "LOGNAME", "PATH", "SHELL", "TERM", "TZ", "USER"),
        *("CONDA_PREFIX", "LD_LIBRARY_PATH", "VIRTUAL_ENV"),
        *("HF_DATASETS_OFFLINE", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM"),
        *("CUDA_VISIBLE_DEVICES", "MPLBACKEND", "TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE"),
        *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "RANK", "WORLD_SIZE"),
    }
)
"""Allowed environment variables, in addition to variables with one of `PREFIXES`."""
PREFIXES = (
    *("LC_", "MALLOC_", "PYTHON", "TORCH_"),
    *("BLIS_", "GOMP_", "KMP_", "MKL_", "NUMEXPR_", "OMP_", "OPENBLAS_"),
)
"""Prefixes of allowed variables: settings of the interpreter and of numerical libraries."""
_PROXIES = ("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
PROXIES = frozenset((*_PROXIES, *map(str.lower, _PROXIES)))
"""Variables with the addresses of proxies, allowed with a network."""
CERTIFICATES = frozenset({"CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_DIR", "SSL_CERT_FILE"})


@dataclass(frozen=True)
class VisiblePaths:
    """Absolute paths that are visible to sandboxed code."""

    packages: tuple[str, ...]
    """Paths of Python's installation and of programs; always read-only."""
    folders: tuple[str, ...]
    """Folders and files from which modules are imported, without hidden files (`.env`, `.git`, `.ssh`)."""
    read: tuple[str, ...]
    """Paths in ``limits.read``, including their hidden files."""
    writable: bool
    """Whether code may write to ``folders`` and ``read``."""


def allowed_environment(
    environment: Mapping[str, str],
    names: Sequence[str] = (),
    *,
    network: bool = False,
) -> dict[str, str]:
    """Return the environment variables for a sandboxed process, selected from ``environment``.

    ``names`` are the variables in ``limits.environment``, which are allowed in addition.

    Example:
        >>> allowed_environment({"OMP_NUM_THREADS": "1", "GH_PAT": "x", "MINE": "y"}, ["MINE"])
        {'OMP_NUM_THREADS': '1', 'MINE': 'y'}
    """
    allowed_variables = {}
    for name, value in environment.items():
        is_listed = name in VARIABLES or name.startswith(PREFIXES)
        if network:
            # The address of a proxy may contain a password, before an @.
            is_listed = is_listed or name in CERTIFICATES or (name in PROXIES and "@" not in value)

        if name in names or (is_listed and not is_secret(name)):
            allowed_variables[name] = value
    return allowed_variables


def find_visible_paths(
    code_path: str,
    read_paths: Sequence[str] = (),
    *,
    network: bool = False,
    writable: bool = False,
) -> VisiblePaths:
    """Return the files and folders that a sandboxed process can read.

    Args:
        code_path: User's code that the process runs, as ``module:name`` or ``file.py:name``.
        read_paths: Paths in ``limits.read``.
        network: Whether the process can use the network. Then the certificates that environment variables
            name are also visible.
        writable: Whether the process can write to files. Then the current folder is also visible, even if
            other users share the folder.
    """
    package_paths = [*_interpreter_paths(), *_program_folders()]
    if network:
        package_paths += [os.environ[name] for name in CERTIFICATES if os.environ.get(name)]

    # Modules are imported from the search path, where "" is the current folder, and from the code's folder.
    folders = [folder or os.getcwd() for folder in sys.path]
    folders.append(os.getcwd())
    module = code_path.rpartition(":")[0]
    if module.endswith(".py"):
        folders.append(os.path.dirname(os.path.abspath(module)))
    importable_paths: list[str] = []
    for folder in folders:
        importable_paths += _import_paths(folder)
    importable_paths += _editable_packages()
    if writable and os.getcwd() != "/":
        importable_paths.append(os.getcwd())

    user_paths = [os.path.abspath(os.path.expanduser(path)) for path in read_paths]
    return VisiblePaths(
        packages=_existing_paths(package_paths),
        folders=_existing_paths(importable_paths),
        read=_existing_paths(user_paths),
        writable=writable,
    )


def is_shared(folder: str) -> bool:
    """Return whether a folder is shared by several programs or users, such as `/`, `/tmp` and a home.

    The parent folders of a home are also shared.
    """
    real_path = os.path.realpath(folder)
    home_folders = _home_folders(os.path.expanduser("~"), os.getuid())
    if real_path in _SHARED_FOLDERS or os.path.dirname(real_path) == "/home":
        return True
    return any(home == real_path or home.startswith(f"{real_path}/") for home in home_folders)


@cache
def _home_folders(home: str, user: int) -> frozenset[str]:
    """Return the real paths of ``home`` and of the user's home in the user database."""
    home_folders = {os.path.realpath(home)}
    # In a container the user may have no entry in the user database.
    with contextlib.suppress(KeyError):
        home_folders.add(os.path.realpath(pwd.getpwuid(user).pw_dir))
    return frozenset(home_folders)


def resolve_links(path: str) -> tuple[list[tuple[str, str]], str]:
    """Return the symbolic links in an absolute path as (link, target), and the path without links."""
    links: list[tuple[str, str]] = []
    # Remaining components in reverse order: the next component is the last.
    components = _reversed_components(path)
    real_path = "/"
    while components:
        component = components.pop()
        if component == ".":
            continue
        if component == "..":
            real_path = os.path.dirname(real_path)
            continue

        component_path = os.path.join(real_path, component)
        if not os.path.islink(component_path) or len(links) == _MAX_LINKS:
            real_path = component_path
            continue

        # Resolve the target of the link before the remaining components.
        target = os.readlink(component_path)
        links.append((component_path, target))
        if target.startswith("/"):
            real_path = "/"
        components += _reversed_components(target)
    return links, real_path


def _reversed_components(path: str) -> list[str]:
    """Return the components of a path in reverse order."""
    return [component for component in reversed(path.split("/")) if component]


def _interpreter_paths() -> Iterator[str]:
    """Yield the files and folders of this process's Python installation and of its loaded libraries.

    In a shared folder (`is_shared`), yield only the files and folders that belong to Python.
    """
    yield sys.executable
    yield str(Path(__file__).resolve().parents[1])
    for prefix in {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}:
        if is_shared(prefix):
            yield from (os.path.join(prefix, name) for name in ("bin", "lib", "lib64", "pyvenv.cfg"))
        else:
            yield prefix

    # The interpreter's libraries may be anywhere, for example in a Conda environment. Find the loaded
    # libraries in the memory mappings of this process.
    folders: set[str] = set()
    with open("/proc/self/maps") as maps:
        for line in maps:
            if ".so" in line:
                # The sixth column of a mapping is its file.
                library = line.split(None, 5)[5].strip()
                folders.add(os.path.dirname(library))
    for folder in folders:
        if folder.startswith("/") and not is_shared(folder) and not _is_below_user_folder(folder):
            yield folder


def _program_folders() -> Iterator[str]:
    """Yield the folders in PATH and LD_LIBRARY_PATH, except shared folders and folders in a home."""
    for name in ("PATH", "LD_LIBRARY_PATH"):
        for folder in os.environ.get(name, "").split(":"):
            if folder.startswith("/") and not is_shared(folder) and not _is_below_user_folder(folder):
                yield folder


def _is_below_user_folder(folder: str) -> bool:
    """Return whether a folder is below a folder in which users store files: a home, /tmp or /run."""
    real_path = os.path.realpath(folder)
    home = os.path.realpath(os.path.expanduser("~"))
    user_folders = ["/root", "/home", "/tmp", "/run"]
    if home != "/":
        user_folders.append(home)
    return any(real_path.startswith(f"{user_folder}/") for user_folder in user_folders)


def _import_paths(folder: str) -> Iterator[str]:
    """Yield the paths to make visible for imports from a folder of the search path.

    If the folder is not shared with other users (`is_shared`), the only path is the folder itself. Otherwise
    the paths are the Python files and packages in the folder.
    """
    if not is_shared(folder):
        yield folder
        return
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return

    for entry in entries:
        is_module = entry.name.endswith((".py", ".so"))
        is_package = os.path.isfile(os.path.join(entry.path, "__init__.py"))
        if is_module or is_package:
            yield entry.path


def _editable_packages() -> Iterator[str]:
    """Yield the folders of packages that setuptools installed as editable with an import hook."""
    # Such a package is not in the search path: its hook's module has a mapping of packages to folders.
    for finder in sys.meta_path:
        name = str(getattr(finder, "__module__", ""))
        if not name.startswith("__editable__"):
            continue
        mapping = getattr(sys.modules.get(name), "MAPPING", None)
        if isinstance(mapping, dict):
            yield from map(str, mapping.values())


def _existing_paths(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the absolute paths in ``paths`` that exist, without duplicates, in their order."""
    existing_paths: dict[str, None] = {}
    for path in paths:
        if os.path.isabs(path) and os.path.exists(path):
            existing_paths[path] = None
    return tuple(existing_paths)
