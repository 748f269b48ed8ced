"""Files, and variables of the environment, that contained code has: those that are allowed, and no other.

A path is visible because the interpreter needs it (its installation, what is imported from, the libraries
of the system), because the code is there, or because ``limits.read`` names it. Of a folder that is shared
by many purposes (`/`, a home, `/tmp`) only Python files and packages are: it may be the folder that a run is
started in, and holds a user's keys.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.redaction import is_secret

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/sys/devices/system")
"""Programs and libraries, and what numerical libraries read of processors and memory."""
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
"""Files of /etc that programs expect and that hold nothing of anybody's."""
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

_SHARED_FOLDERS = frozenset(
    {
        *("/", "/boot", "/dev", "/etc", "/home", "/media", "/mnt", "/opt", "/proc", "/root", "/run"),
        *("/srv", "/sys", "/tmp", "/var", "/var/tmp"),
    }
)

VARIABLES = frozenset(
    {
        *("HOME", "LANG", "LANGUAGE", "LOGNAME", "PATH", "SHELL", "TERM", "TZ", "USER"),
        *("CONDA_PREFIX", "LD_LIBRARY_PATH", "VIRTUAL_ENV"),
        *("HF_DATASETS_OFFLINE", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM"),
        *("CUDA_VISIBLE_DEVICES", "MPLBACKEND", "TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE"),
        *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "RANK", "WORLD_SIZE"),
    }
)
"""Variables of the environment that contained code has, beside those of `PREFIXES`."""
PREFIXES = (
    *("LC_", "MALLOC_", "PYTHON", "TORCH_"),
    *("BLIS_", "GOMP_", "KMP_", "MKL_", "NUMEXPR_", "OMP_", "OPENBLAS_"),
)
"""Beginnings of names of variables that set up the interpreter and numerical libraries."""
_PROXIES = ("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
PROXIES = frozenset((*_PROXIES, *map(str.lower, _PROXIES)))
CERTIFICATES = frozenset({"CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_DIR", "SSL_CERT_FILE"})


@dataclass(frozen=True)
class Visible:
    """Paths that contained code sees.

    ``packages`` are parts of installations. Of ``folders``, which modules are imported from, hidden entries
    (`.env`, `.git`, `.ssh`) are left out. ``read`` is what the user names, all of it. ``writable`` says
    whether code may write to the latter two.
    """

    packages: tuple[str, ...]
    folders: tuple[str, ...]
    read: tuple[str, ...]
    writable: bool


def allowed_environment(
    environment: Mapping[str, str], names: Sequence[str] = (), *, network: bool = False
) -> dict[str, str]:
    """Return the variables of ``environment`` that contained code has; ``names`` are the user's own.

    Example:
        >>> allowed_environment({"OMP_NUM_THREADS": "1", "GH_PAT": "x", "MINE": "y"}, ["MINE"])
        {'OMP_NUM_THREADS': '1', 'MINE': 'y'}
    """
    allowed = {}
    for name, value in environment.items():
        usual = name in VARIABLES or name.startswith(PREFIXES)
        if network:
            # A proxy's address may hold a password.
            usual = usual or name in CERTIFICATES or (name in PROXIES and "@" not in value)
        if name in names or (usual and not is_secret(name)):
            allowed[name] = value
    return allowed


def visible_paths(
    code: str, read: Sequence[str] = (), *, network: bool = False, write: bool = False
) -> Visible:
    """Return what code sees that is named as ``module:name`` or ``file.py:name``.

    With ``write``, the folder that the run is started in is visible, too, whatever else is in it.
    """
    packages = [*_interpreter(), *_programs()]
    if network:
        packages += [path for name in CERTIFICATES if (path := os.environ.get(name))]

    folders = [entry or os.getcwd() for entry in sys.path]
    folders.append(os.getcwd())
    place = code.rpartition(":")[0]
    if place.endswith(".py"):
        folders.append(os.path.dirname(os.path.abspath(place)))
    importable = [path for folder in folders for path in _importable(folder)]
    importable += _editable()
    if write and os.getcwd() != "/":
        importable.append(os.getcwd())
    named = [os.path.abspath(os.path.expanduser(path)) for path in read]
    return Visible(_existing(packages), _existing(importable), _existing(named), write)


def is_shared(folder: str) -> bool:
    """Return whether a folder serves many purposes: `/`, a home or what holds one, `/tmp` and its like."""
    path = os.path.realpath(folder)
    homes = {os.path.realpath(os.path.expanduser("~"))}
    with contextlib.suppress(KeyError):  # a container's user without an entry
        homes.add(os.path.realpath(pwd.getpwuid(os.getuid()).pw_dir))
    if path in _SHARED_FOLDERS or os.path.dirname(path) == "/home":
        return True
    return any(home == path or home.startswith(f"{path}/") for home in homes)


def links_to(path: str) -> tuple[list[tuple[str, str]], str]:
    """Return the symbolic links on the way to an absolute path, with their texts, and the real path."""
    links: list[tuple[str, str]] = []
    parts = [part for part in reversed(path.split("/")) if part]
    real = "/"
    while parts:
        part = parts.pop()
        if part == "..":
            real = os.path.dirname(real)
        elif part != ".":
            step = os.path.join(real, part)
            if os.path.islink(step) and len(links) < 40:  # as many as the kernel follows
                text = os.readlink(step)
                links.append((step, text))
                real = "/" if text.startswith("/") else real
                parts += [part for part in reversed(text.split("/")) if part]
            else:
                real = step
    return links, real


def _interpreter() -> Iterator[str]:
    """Yield the installation that this process runs from; of one in a shared folder, its parts."""
    yield sys.executable
    yield str(Path(__file__).resolve().parents[1])
    for prefix in {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}:
        if is_shared(prefix):
            yield from (os.path.join(prefix, part) for part in ("bin", "lib", "lib64", "pyvenv.cfg"))
        else:
            yield prefix
    # Libraries of the interpreter itself may be anywhere: modules of a cluster, environments of Conda.
    with open("/proc/self/maps") as maps:
        files = {line.split(None, 5)[5].strip() for line in maps if ".so" in line}
    for folder in {os.path.dirname(file) for file in files}:
        if folder.startswith("/") and not is_shared(folder) and not _in_a_home(folder):
            yield folder


def _programs() -> Iterator[str]:
    """Yield folders of programs and libraries that the environment names, but for a user's own."""
    for name in ("PATH", "LD_LIBRARY_PATH"):
        for folder in os.environ.get(name, "").split(":"):
            if folder.startswith("/") and not is_shared(folder) and not _in_a_home(folder):
                yield folder


def _in_a_home(folder: str) -> bool:
    path = os.path.realpath(folder)
    roots = ("/root", "/home", "/tmp", "/run", os.path.realpath(os.path.expanduser("~")))
    return any(path.startswith(f"{root}/") for root in roots if root != "/")


def _importable(folder: str) -> Iterator[str]:
    """Yield a folder that modules are imported from; of a shared one, its Python files and packages."""
    if not is_shared(folder):
        yield folder
        return
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        if entry.name.endswith((".py", ".so")) or os.path.isfile(os.path.join(entry.path, "__init__.py")):
            yield entry.path


def _editable() -> Iterator[str]:
    """Yield the folders of packages that setuptools installed in place without adding to the path."""
    for name, module in list(sys.modules.items()):
        mapping = getattr(module, "MAPPING", None) if name.startswith("__editable__") else None
        if isinstance(mapping, dict):
            yield from map(str, mapping.values())


def _existing(paths: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for path in paths if os.path.isabs(path) and os.path.exists(path)))
