"""Time to the first token from the start of the process, beside what torch and the weights alone take.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/startup.py [--model DIR] [--repeat 7]

Every run is a process of its own and caches are warm: one run of each kind is thrown away, and bytecode is kept. Kinds
take turns: an empty interpreter, `import torch`, ours up to the first piece of text that `LLM.stream` yields, and the
command `polytempo generate` as a whole, its end included. The floor is `import torch` plus the seconds that loading
the weights takes inside our run; the ratio is ours over it. Medians; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

PROMPT = "def main("
# Each prints the moment at which it was there: ending a process that has loaded torch takes another half second.
# The monotonic clock is one for all processes of a machine.
BARE = {
    "python": "import time; print(time.monotonic())",
    "import torch": "import time, torch; print(time.monotonic())",
}
OURS = """
import json, sys, time
stamps = {"interpreter": time.monotonic()}
import torch
stamps["import torch"] = time.monotonic()
import polytempo.llm as home
stamps["import polytempo"] = time.monotonic()
load = home.load_model
def timed_load(*arguments, **options):
    loaded = load(*arguments, **options)
    stamps["weights"] = time.monotonic()
    return loaded
home.load_model = timed_load
llm = home.LLM(sys.argv[2] or None, progress=False)
stamps["tokenizer and engine"] = time.monotonic()
next(llm.stream(sys.argv[3], home.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)))
stamps["first token"] = time.monotonic()
moments = [float(sys.argv[1]), *stamps.values()]
print(json.dumps({name: moments[place + 1] - moments[place] for place, name in enumerate(stamps)}))
"""
COMMAND = """
import sys
from polytempo.cli import main
sys.argv[0] = "polytempo"
main()
"""


def child_environment() -> dict[str, str]:
    """This process's, but bytecode is kept: without it every run would compile our sources again."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def output_of(code: str, *arguments: str) -> str:
    """What a process of its own printed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, env=child_environment()
    )
    if done.returncode:
        sys.exit(f"a run failed: {done.stderr.strip()}")
    return done.stdout


def one_round(model: str) -> dict[str, float]:
    """Every kind once; ours by phase."""
    taken = {}
    for name, code in BARE.items():
        started = time.monotonic()
        taken[name] = float(output_of(code)) - started
    phases = json.loads(output_of(OURS, str(time.monotonic()), model, PROMPT))
    taken |= {f"ours: {name}": seconds for name, seconds in phases.items()}
    taken["to first token"] = sum(phases.values())
    command = ["generate", "--prompt", PROMPT, "--max-tokens", "1", "--temperature", "0"]
    started = time.monotonic()
    output_of(COMMAND, *command, *(["--model", model] if model else []))
    taken["polytempo generate, to its end"] = time.monotonic() - started
    return taken


def measure(model: str, repeat: int) -> dict[str, float]:
    """Medians in seconds by kind and phase, and the ratio.

    Args:
        model: checkpoint directory, "" for the demo model.
        repeat: runs of each kind, after one for warmth.

    Returns:
        Seconds by name; "floor" and "ratio" are computed from them.
    """
    one_round(model)
    rounds = [one_round(model) for _ in range(repeat)]
    result = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    result["floor"] = result["import torch"] + result["ours: weights"]
    result["ratio"] = result["to first token"] / result["floor"]
    return result


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint directory with a tokenizer [default: the demo model]")
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    result = measure(str(options.model or ""), options.repeat)
    for name, value in result.items():
        print(f"{name:<32}{value:8.3f}{'' if name == 'ratio' else ' s'}")
    result = {name: round(value, 4) for name, value in result.items()}
    print(json.dumps({"repeat": options.repeat, "threads": os.environ.get("OMP_NUM_THREADS"), **result}))


if __name__ == "__main__":
    main()
