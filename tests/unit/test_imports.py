"""Imports go one way, and what needs no torch imports none."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import polytempo

ROOT = Path(polytempo.__file__).parent
# A module may import from its own part and from parts before it, never from one beside it.
ORDER = (("errors", "lazy"), ("outputs", "config_fields"), ("types", "config", "engine_config", "device"),
         ("tokenizer", "cache", "kernels", "gpu", "thread_placement"), ("model", "prompts"), ("checkpoint", "engine"),
         ("llm", "serving_thread", "invariance_probes"), ("demo", "invariance", "bench", "async_llm"), ("server",),
         ("cli",))  # fmt: skip
RANK = {part: rank for rank, parts in enumerate(ORDER) for part in parts}
NO_TORCH = ("errors.py", "outputs.py", "types.py", "config_fields.py", "config.py", "engine_config.py", "tokenizer.py",
            "cache/layout.py", "cache/pool.py", "engine/row.py", "engine/scheduler.py", "engine/grammar.py",
            "engine/stats.py", "serving_thread.py")  # fmt: skip
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def imported(file: str) -> set[str]:
    """Every module that a file imports, wherever in it; relative imports are not used in this package."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} line {node.lineno}: relative import"
            names.add(node.module)
    return names


@pytest.mark.parametrize("file", FILES)
def test_imports_go_one_way(file):
    own = file.split("/")[0].removesuffix(".py")
    assert own in RANK, f"{file}: say in ORDER where {own!r} belongs"
    parts = {name.split(".")[1] for name in imported(file) if name.startswith("polytempo.")}
    wrong = sorted(part for part in parts - {own} if RANK[part] >= RANK[own])
    assert not wrong, f"{file} imports {wrong}, which do not come before {own!r}"


@pytest.mark.parametrize("file", NO_TORCH)
def test_no_torch(file):
    assert not {name for name in imported(file) if name.split(".")[0] == "torch"}
