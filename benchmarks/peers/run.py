"""Run engines one after the other on one checkpoint, each in a process of its own, and print one table.

    python benchmarks/peers/run.py DIR [--engines polytempo,transformers,vllm,llama.cpp] [-b 1,8,32,128] [--repeat 1]
        [--prompt-lens 256,2048,16384] [--dtype bfloat16,float32] [--modes none,packed,auto] [--python vllm=FILE]

DIR is what make_checkpoint.py wrote; forms that lack are made. Engines take turns; of the repeats the median counts. An
engine runs in the interpreter that --python names for it, else in .venv-NAME beside pyproject.toml if there is, else
in this one; README.md says how these are made. What does not start, fails, or has no figure for --time-limit seconds is
in the table with its reason. Ratios are to transformers at the same dtype. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FORMS = ("official", "hf", "bf16")
POLL_S = 0.5
GRACE_S = 10  # for an engine to end by itself after its last word
FIGURES = ("tokens_per_second", "step_ms", "prefill_tokens_per_second")


@dataclass(frozen=True)
class Engine:
    """How an engine is run.

    Attributes:
        script: in this directory.
        form: of the checkpoint, below DIR.
        dtypes: those that it is asked for.
        modes: "none" expands weights; "packed" keeps them as the checkpoint stores them, "auto" does and drafts.
        can_limit: whether it lives with a limit on its memory.
        start_s: seconds that it may take before the time limit of its first figure begins; it compiles.
    """

    script: str
    form: str
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    modes: tuple[str, ...] = ("none",)
    can_limit: bool = True
    start_s: float = 0.0


ENGINES = {
    "polytempo": Engine("polytempo_peer.py", "official", modes=("none", "packed", "auto")),
    "transformers": Engine("transformers_peer.py", "hf"),
    "vllm": Engine("vllm_peer.py", "bf16", can_limit=False, start_s=180.0),
    "llama.cpp": Engine("llama_cpp_peer.py", "model.gguf", dtypes=("bfloat16",)),
}


@dataclass(frozen=True)
class Run:
    """One process."""

    name: str
    dtype: str
    mode: str

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.name} {self.dtype}{'' if self.mode == 'none' else ' ' + self.mode}"


def interpreter(name: str, given: dict[str, str]) -> str:
    """The Python that runs an engine."""
    own = ROOT / f".venv-{name}" / "bin" / "python"
    return given.get(name) or (str(own) if own.exists() else sys.executable)


def command(run: Run, options: argparse.Namespace) -> list[str]:
    """The process of a run."""
    engine = ENGINES[run.name]
    words = [interpreter(run.name, options.pythons), str(HERE / engine.script), str(options.folder / engine.form)]
    words += ["-b", options.batch, "--max-tokens", str(options.max_tokens), "--prompt-lens", options.prompt_lens]
    words += ["--dtype", run.dtype, "--mode", run.mode]
    words += ["--threads", str(options.threads)] if options.threads else []
    return words + (["--memory-gib", str(options.memory_gib)] if engine.can_limit else [])


def end_group(process: subprocess.Popen) -> int:
    """End an engine with all processes that it started: one that stays would keep our pipes open, and us waiting."""
    try:
        code = process.wait(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        code = None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait() if code is None else code


def figures(words: list[str], limit: float, start: float = 0.0) -> Iterator[dict]:
    """What a process prints, object by object; the last may be {"failed": reason}.

    Args:
        words: the command.
        limit: most seconds from one object to the next, the start included.
        start: seconds more for the first.

    Yields:
        Objects of common.py's `report`.
    """
    lines: queue.Queue[str | None] = queue.Queue()
    try:
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
    except OSError as error:
        yield {"failed": str(error)}
        return
    said: list[str] = []

    def read_output() -> None:
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    readers = [threading.Thread(target=read_output), threading.Thread(target=lambda: said.extend(process.stderr))]
    for reader in readers:
        reader.start()
    try:
        heard = time.monotonic() + start
        while time.monotonic() - heard < limit:
            try:
                line = lines.get(timeout=POLL_S)
            except queue.Empty:
                if process.poll() is not None:
                    break  # a process that it started keeps the pipe open
                continue
            if line is None:
                break
            if line.startswith("{"):
                heard = time.monotonic()
                yield json.loads(line)
        else:
            process.kill()
            yield {"failed": f"no further figure in {limit:.0f} s"}
            return
    finally:
        code = end_group(process)
        for reader in readers:
            reader.join()
    if code:
        yield {"failed": ([line.strip() for line in said if line.strip()] or [f"exit code {code}"])[-1][:300]}


def median_of(taken: list[dict]) -> dict:
    """One figure out of its repeats; a failed one stands for all."""
    failed = [one for one in taken if "failed" in one]
    if failed:
        return failed[0]
    medians = {name: statistics.median(one[name] for one in taken) for name in FIGURES if name in taken[0]}
    return {**taken[0], **medians, "repeats": len(taken)}


def ratio(row: dict, rows: list[dict], name: str) -> str:
    """Over transformers at the same dtype, kind and size."""
    for other in rows:
        same = all(other.get(key) == row.get(key) for key in ("dtype", "kind", "size"))
        if other["engine"] == "transformers" and same and name in other and name in row:
            return f"{row[name] / other[name]:.2f}"
    return "-"


def table(rows: list[dict]) -> str:
    """A line per figure and per failure."""
    lines = [f"{'engine':<13}{'dtype':<14}{'mode':<7}{'what':<9}{'size':>6}{'tok/s':>10}{'ratio':>7}{'step ms':>10}"
             f"{'prefill tok/s':>15}{'ratio':>7}"]  # fmt: skip
    for row in rows:
        head = (f"{row['engine']:<13}{row['dtype']:<14}{row['mode']:<7}{row.get('kind', ''):<9}"
                f"{row.get('size', ''):>6}")  # fmt: skip
        if "failed" in row:
            lines.append(f"{head}  skipped: {row['failed']}")
            continue
        lines.append(
            f"{head}{row.get(FIGURES[0], '-'):>10}{ratio(row, rows, FIGURES[0]):>7}{row.get(FIGURES[1], '-'):>10}"
            f"{row[FIGURES[2]]:>15}{ratio(row, rows, FIGURES[2]):>7}"
        )
    return "\n".join(lines)


def read_options() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("-b", "--batch", default="1,8,32")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--prompt-lens", default="256,2048,16384", help="of one row, for prefill alone; '' for none")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--modes", default="none,packed,auto", help="of polytempo: plain, packed weights, drafts")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--threads", type=int, help="of llama.cpp; others follow OMP_NUM_THREADS")
    parser.add_argument("--time-limit", type=float, default=60.0, help="most seconds for one figure")
    parser.add_argument("--memory-gib", type=float, default=12.0, help="most memory of an engine; not of vllm")
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=FILE", help="its interpreter")
    options = parser.parse_args()
    options.pythons = dict(one.split("=", 1) for one in options.python)
    if unknown := [name for name in (*options.engines.split(","), *options.pythons) if name not in ENGINES]:
        parser.error(f"unknown engines {unknown}; known: {', '.join(ENGINES)}")
    return options


def main() -> None:
    """Run everything, print the table."""
    options = read_options()
    if not all((options.folder / form).exists() for form in FORMS):
        subprocess.run([sys.executable, str(HERE / "make_checkpoint.py"), str(options.folder)], check=True)
    dtypes, modes = options.dtype.split(","), options.modes.split(",")
    runs = [Run(name, dtype, mode) for name in options.engines.split(",") for dtype in ENGINES[name].dtypes
            for mode in ENGINES[name].modes if dtype in dtypes and mode in modes]  # fmt: skip
    taken: dict[tuple, list[dict]] = {}
    stopped: set[Run] = set()
    for _ in range(options.repeat):
        for run in runs:
            start = ENGINES[run.name].start_s
            for found in () if run in stopped else figures(command(run, options), options.time_limit, start):
                row = {"engine": run.name, "dtype": run.dtype, "mode": run.mode, **found}
                taken.setdefault((run, row.get("kind"), row.get("size")), []).append(row)
                if "failed" in row:
                    stopped.add(run)  # the figures that it has so far stay
            print(f"{run.label}: {'stopped' if run in stopped else 'done'}", file=sys.stderr, flush=True)
    rows = [median_of(one) for one in taken.values()]
    print(table(rows))
    print(json.dumps({"batches": options.batch, "results": rows}))


if __name__ == "__main__":
    main()
