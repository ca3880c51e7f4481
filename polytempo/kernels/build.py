"""Compiles the C++ sources once per machine and loads the result.

The library lies in the user's cache directory under a name that is a hash of everything it depends on: sources,
flags, compiler, processor. It is written under another name first and then renamed, so that two processes that start
at once, or one that is killed, leave a whole file or none.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from functools import lru_cache
from pathlib import Path

from polytempo.config import cache_dir
from polytempo.errors import PolytempoError
from polytempo.kernels.structs import check_sizes, declare

SOURCES = Path(__file__).parent
COMPILERS = ("g++", "c++", "clang++")
# No -ffast-math, and no contraction by the compiler's choice: an element's arithmetic must not depend on where in a
# loop it falls.
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-pthread", "-shared", "-fvisibility=hidden",
         "-ffp-contract=off", "-fno-math-errno", "-w")  # fmt: skip
BUILD_SECONDS = 300


class KernelError(PolytempoError):
    """The kernels cannot be built or loaded here; the message says why."""


def load() -> ctypes.CDLL:
    """The library, built if there is none in the cache yet.

    Returns:
        It, with every function declared.

    Raises:
        KernelError: no compiler, a failed build, or a library that this process cannot use.
    """
    compiler = _compiler()
    path = cache_dir() / f"kernels-{_key(compiler)}.so"
    if _is_whole(path):
        try:
            return _open(path)
        except (OSError, KernelError):
            pass  # from another system: build it again
    _build(compiler, path)
    try:
        return _open(path)
    except OSError as error:
        raise KernelError(f"the library that {compiler} built cannot be loaded: {error}") from None


@lru_cache(maxsize=1)
def load_or_note() -> ctypes.CDLL | None:
    """`load`, or None after one warning that says why the torch path is used."""
    try:
        return load()
    except KernelError as error:
        warnings.warn(f"no native kernels, torch is used instead: {error}", RuntimeWarning, stacklevel=3)
        return None


def _compiler() -> str:
    for name in COMPILERS:
        if path := shutil.which(name):
            return path
    raise KernelError(f"no C++ compiler found (looked for {', '.join(COMPILERS)})")


def _sources() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))


def _key(compiler: str) -> str:
    """Hash of all that the library depends on."""
    digest = hashlib.sha256(repr((_processor_flags(), FLAGS, compiler, _processor())).encode())
    try:
        digest.update(subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=60).stdout)
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelError(f"{compiler} --version failed: {error}") from None
    for path in _sources():
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:24]


def _cpuinfo() -> list[str]:
    """Lines that say what the processor is, as Linux gives them; none elsewhere."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _processor() -> str:
    """The processor's instruction sets: a cache directory may be shared by unlike machines."""
    for line in _cpuinfo():
        if line.startswith(("flags", "Features")):
            return line
    return platform.machine() + platform.processor()


def _processor_flags() -> tuple[str, ...]:
    """What the kernels have to know of the processor and the compiler does not tell them.

    On Intel's cores from Sapphire Rapids on, which have AVX512-FP16, a bfloat16 dot product takes as long as four fused
    multiply-adds of floats and does the work of two: measured on an Emerald Rapids, docs/kernels.md. On AMD's Zen 4 it
    is the faster way. Read from the processor's names and not measured here, for it decides how sums round.
    """
    names = {name for line in _cpuinfo() if line.startswith(("vendor_id", "flags")) for name in line.split()}
    return ("-DPT_SLOW_BF16_DOT",) if {"GenuineIntel", "avx512_fp16"} <= names else ()


def _build(compiler: str, path: Path) -> None:
    """Compile into a temporary file beside `path`, then rename it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
            library = Path(folder, "kernels.so")
            _run([compiler, *_processor_flags(), *FLAGS, str(SOURCES / "polytempo.cpp"), "-o", str(library)])
            _seal(library)
            os.replace(library, path)
    except OSError as error:
        raise KernelError(f"cannot write to the cache directory {path.parent}: {error}") from None


def _seal(path: Path) -> None:
    """Append the hash of a file to it; the loader does not mind."""
    content = path.read_bytes()
    path.write_bytes(content + hashlib.sha256(content).digest())


def _is_whole(path: Path) -> bool:
    """Whether a sealed file is there and as it was: loading one that was cut short ends the process (SIGBUS)."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    except subprocess.SubprocessError as error:
        raise KernelError(f"{command[0]} failed: {error}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise KernelError(f"{command[0]} failed: {lines[0]}")


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    try:
        declare(library)
        check_sizes(library)
    except (AttributeError, ValueError) as error:
        raise KernelError(f"{path} does not fit this version: {error}") from None
    return library
