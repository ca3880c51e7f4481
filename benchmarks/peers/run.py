"""Run engines one after the other on one checkpoint, each in a process of its own, and print one table.

    python benchmarks/peers/run.py DIR [--engines polytempo,transformers] [-b 1,8,32,128] [--repeat 3]

DIR is what make_checkpoint.py wrote, and is written if it is empty. Engines take turns; of each engine's repeats the
median counts. An engine whose package is not installed here is skipped with the reason. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENGINES = {"polytempo": ("polytempo_peer.py", "official"), "transformers": ("transformers_peer.py", "hf")}


def run(engine: str, folder: Path, batches: str) -> list[dict] | str:
    """One engine's rows, or why there are none."""
    script, form = ENGINES[engine]
    command = [sys.executable, str(HERE / script), str(folder / form), "-b", batches]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no output"])[-1]
    return json.loads(done.stdout.splitlines()[-1])


def medians(runs: list[list[dict]]) -> list[dict]:
    """Per batch, the median of every figure."""
    rows = []
    for place, first in enumerate(runs[0]):
        row = dict(first)
        for name in ("tokens_per_second", "step_ms", "prefill_tokens_per_second"):
            row[name] = statistics.median(one[place][name] for one in runs)
        rows.append(row)
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("-b", "--batch", default="1,8,32,128")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    engines = options.engines.split(",")
    if unknown := [engine for engine in engines if engine not in ENGINES]:
        parser.error(f"unknown engines {unknown}; known: {', '.join(ENGINES)}")
    if not (options.folder / "official").exists():
        subprocess.run([sys.executable, str(HERE / "make_checkpoint.py"), str(options.folder)], check=True)
    runs: dict[str, list] = {engine: [] for engine in engines}
    skipped: dict[str, str] = {}
    for _ in range(options.repeat):
        for engine in engines:
            if engine not in skipped:
                outcome = run(engine, options.folder, options.batch)
                if isinstance(outcome, str):
                    skipped[engine] = outcome
                else:
                    runs[engine].append(outcome)
    results = [row for engine in engines if runs[engine] for row in medians(runs[engine])]
    print(f"{'engine':<14}{'rows':>6}{'tok/s':>10}{'step ms':>10}{'prefill tok/s':>15}")
    for row in results:
        print(f"{row['engine']:<14}{row['batch']:>6}{row['tokens_per_second']:>10}{row['step_ms']:>10}"
              f"{row['prefill_tokens_per_second']:>15}")  # fmt: skip
    for engine, reason in skipped.items():
        print(f"{engine}: skipped, {reason}")
    print(json.dumps({"results": results, "skipped": skipped}))


if __name__ == "__main__":
    main()
