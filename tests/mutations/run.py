"""Break one line at a time, and require that the tests notice.

Each `[[mutation]]` of tests/mutations/*.toml is applied in a copy of the tree, its `test` is run there, and must
fail. First, all listed tests must pass on the unchanged copy. Exit code 1: a mutant survived; 2: the lists or the
unchanged tests are at fault.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

try:
    import tomllib
except ModuleNotFoundError:
    sys.exit("mutants need Python 3.11 or newer (tomllib); everything else runs on 3.10")

LISTS = Path(__file__).resolve().parent
ROOT = LISTS.parents[1]
COPIED = ("polytempo", "tests", "pyproject.toml")
FIELDS = {"name", "file", "old", "new", "test"}
TIMEOUT_S = 600
# A test of the installed package instead of the copy's would let every mutant live; this fails all tests instead.
GUARD = """
import pathlib
import polytempo

here = pathlib.Path(__file__).resolve().parent
loaded = pathlib.Path(polytempo.__file__).resolve()
assert loaded.is_relative_to(here), f"tests load {loaded}, not the copy in {here}"
"""


HEADING = """# Mutations

Edits of one line (or a few) that the tests must notice, and the first test that did. Written by
`make mutants ARGS="--write docs/mutations.md"`; `--file LIST` runs one list and replaces its table alone.
A table is of the date that it names: edits of later commits are not in it.
"""


class ListError(Exception):
    """A mutation list cannot be used as it stands."""


@dataclass(frozen=True)
class Mutation:
    """One edit.

    Attributes:
        name: unique over all lists.
        file: path from the root, inside polytempo.
        old: text that occurs exactly once in the file.
        new: what replaces it.
        test: pytest arguments that must go red, separated by spaces.
        source: name of the list.
    """

    name: str
    file: str
    old: str
    new: str
    test: str
    source: str

    def mutated(self, root: Path) -> str:
        """The file's text with the edit."""
        path = root / self.file
        if not self.file.startswith("polytempo/") or not path.is_file():
            raise ListError(f"{self.source}: {self.name!r} names {self.file!r}, which is not a file of polytempo")
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ListError(
                f"{self.source}: {self.name!r} replaces text that occurs {text.count(self.old)} times in {self.file}; "
                f"it must occur once: {self.old!r}"
            )
        if self.old == self.new:
            raise ListError(f"{self.source}: {self.name!r} replaces text by itself")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: killed, SURVIVED, or why its run says nothing."""

    mutation: Mutation
    verdict: str
    seconds: float
    detail: str


def read_lists(paths: Sequence[Path]) -> list[Mutation]:
    """All mutations of these lists; every fault of a list is named."""
    mutations: list[Mutation] = []
    for path in paths:
        for number, table in enumerate(tomllib.loads(path.read_text(encoding="utf-8")).get("mutation", []), start=1):
            if set(table) != FIELDS or not all(isinstance(value, str) for value in table.values()):
                raise ListError(f"{path.name}: mutation {number} has {sorted(table)}; it needs text {sorted(FIELDS)}")
            mutations.append(Mutation(**table, source=path.name))
    names = [mutation.name for mutation in mutations]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ListError(f"mutation names occur twice: {twice}")
    return mutations


def make_copy(folder: Path) -> None:
    """Copy what the tests need, and the guard."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", ".hypothesis", ".pytest_cache")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy2(ROOT / name, folder / name)
    (folder / "conftest.py").write_text(GUARD, encoding="utf-8")


def run_tests(copy: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Exit code and output of `pytest -x -q` in the copy."""
    # Bytecode is keyed by second and size: two mutants of one file could share it.
    environment = os.environ | {
        "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": str(copy / ".cache"),
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=short", *tests]
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, text=True, timeout=TIMEOUT_S, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return -1, f"no result after {TIMEOUT_S} s"
    return done.returncode, done.stdout


def first_failure(output: str) -> str:
    """Name of the first test that failed."""
    for line in output.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split(" ")[1].split("/")[-1]
    return ""


def run_mutation(copy: Path, mutation: Mutation) -> Outcome:
    """Apply, test, undo."""
    path = copy / mutation.file
    original, started = path.read_text(encoding="utf-8"), time.monotonic()
    path.write_text(mutation.mutated(copy), encoding="utf-8")
    try:
        code, output = run_tests(copy, shlex.split(mutation.test))
    finally:
        path.write_text(original, encoding="utf-8")
    seconds = time.monotonic() - started
    if code == 1:
        return Outcome(mutation, "killed", seconds, first_failure(output))
    if code == 0:
        return Outcome(mutation, "SURVIVED", seconds, mutation.test)
    # Anything else, an import error or a missing test included, proves nothing about the tests.
    last = [line for line in output.splitlines() if line.strip()][-1:]
    return Outcome(mutation, f"NO RESULT ({code})", seconds, "".join(last)[:100])


def table(outcomes: Sequence[Outcome]) -> str:
    """One line per mutant."""
    rows = [("mutant", "list", "verdict", "s", "noticed by")]
    for outcome in outcomes:
        mutation = outcome.mutation
        rows.append((mutation.name, mutation.source, outcome.verdict, f"{outcome.seconds:.1f}", outcome.detail))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def write_tables(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Put one table per list into a Markdown file; tables of lists that were not run stay as they are."""
    text = path.read_text(encoding="utf-8") if path.exists() else HEADING
    sections = {part.split("\n", 1)[0]: part for part in text.split("\n## ")[1:]}
    for source in dict.fromkeys(outcome.mutation.source for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.mutation.source == source]
        killed = sum(outcome.verdict == "killed" for outcome in own)
        lines = [source, "", f"{killed} of {len(own)} killed, {time.strftime('%Y-%m-%d')}.", ""]
        lines += ["| edit | file | verdict | noticed by |", "|---|---|---|---|"]
        for outcome in own:
            cells = (outcome.mutation.name, outcome.mutation.file, outcome.verdict, outcome.detail)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        sections[source] = "\n".join(lines) + "\n"
    path.write_text(HEADING + "".join(f"\n## {sections[name]}" for name in sorted(sections)), encoding="utf-8")


def chosen_lists(names: Sequence[str] | None) -> list[Path]:
    """Paths of the lists to run, given as `model`, `model.toml` or a path."""
    every = sorted(LISTS.glob("*.toml"))
    if not names:
        return every
    known = {path.stem: path for path in every}
    for name in names:
        if Path(name).stem not in known:
            raise ListError(f"no list {name!r}; known: {', '.join(known)}")
    return [known[Path(name).stem] for name in names]


def run(options: argparse.Namespace) -> int:
    """Check the lists, the unchanged tests, then every mutant; returns the exit code."""
    mutations = read_lists(chosen_lists(options.file))
    if options.only:
        if unknown := sorted(set(options.only) - {mutation.name for mutation in mutations}):
            raise ListError(f"no mutation is named {unknown}")
        mutations = [mutation for mutation in mutations if mutation.name in options.only]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder).resolve()
        make_copy(copy)
        for mutation in mutations:
            mutation.mutated(copy)
        tests = sorted({test for mutation in mutations for test in shlex.split(mutation.test)})
        print(f"{len(mutations)} mutants; first their {len(tests)} tests, unchanged", flush=True)
        code, output = run_tests(copy, tests)
        if code != 0:
            raise ListError(f"the unchanged tests do not pass (pytest exit code {code}):\n{output[-3000:]}")
        outcomes = [run_mutation(copy, mutation) for mutation in tqdm(mutations, unit="mutant")]
    print(table(outcomes))
    if options.write:
        write_tables(options.write, outcomes)
    alive = [outcome for outcome in outcomes if outcome.verdict != "killed"]
    print(f"{len(outcomes) - len(alive)} of {len(outcomes)} mutants killed")
    return 1 if alive else 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="run this mutation; may be repeated")
    parser.add_argument("--file", action="append", metavar="LIST", help="run this list (model, checkpoint, …)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables into this Markdown file")
    try:
        return run(parser.parse_args())
    except ListError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
