"""`polytempo demo`: very different prompts in one speculative batch, then each alone, compared bit for bit."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polytempo.engine.row import Row
from polytempo.llm import LLM
from polytempo.types import CompletionOutput, RequestOutput, SamplingParams

_REDRAW_SECONDS = 0.08
_BAR_WIDTH = 24
_NUM_LOGPROBS = 4


@dataclass(frozen=True)
class DemoPrompt:
    """One prompt of the demo.

    Attributes:
        name: what the table calls it.
        text: the prompt.
        max_tokens: where it ends at the latest; they differ, so that rows leave at different times.
        seed: None is greedy.
        stop: where it may end earlier.
    """

    name: str
    text: str
    max_tokens: int
    seed: int | None = None
    stop: str | None = None

    @property
    def params(self) -> SamplingParams:
        """How to complete it. Log-probabilities are asked for because they show a difference that tokens hide."""
        how = {"temperature": 0.0} if self.seed is None else {"temperature": 0.8, "top_p": 0.95, "seed": self.seed}
        return SamplingParams(max_tokens=self.max_tokens, stop=self.stop, logprobs=_NUM_LOGPROBS, **how)


def demo_prompts() -> list[DemoPrompt]:
    """Eight prompts from 3 to about 700 tokens; the longer ones are pieces of this package's own source."""
    source = (Path(__file__).parent / "types.py").read_text(encoding="utf-8").splitlines(keepends=True)

    def lines(first: int, count: int) -> str:
        return "".join(source[first : first + count])

    return [
        DemoPrompt("import", "import ", 16),
        DemoPrompt("module", lines(0, 46), 12),
        DemoPrompt("function", "def read_lines(path):\n    ", 40, seed=1, stop="\ndef "),
        DemoPrompt("branch", lines(58, 11), 28),
        DemoPrompt("class", "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(", 44),
        DemoPrompt("tables", lines(24, 22), 20, seed=2),
        DemoPrompt("docstring", '"""Read and write', 24, seed=3, stop="\n\n"),
        DemoPrompt("helpers", lines(64, 19), 32, seed=4),
    ]


def run_demo(llm: LLM) -> bool:
    """Print the demo to stdout.

    Args:
        llm: any model with a tokenizer, max_model_len of at least 1024; fewer rows than prompts show a seat refilled.

    Returns:
        Whether every prompt gave the same in the batch as alone.
    """
    prompts = demo_prompts()
    params = [prompt.params for prompt in prompts]
    lengths = [len(llm.tokenizer.encode(prompt.text)) for prompt in prompts]
    config = llm.model.config
    print(
        f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens, {llm.engine.config.max_rows} seats, "
        f"{config.num_hidden_layers} layers, {config.n_routed_experts} experts, {_dtype(llm)} on {llm.model.device}\n"
    )
    display = _display_for_stdout(llm, prompts)
    started, first_step = time.monotonic(), llm.engine.num_steps
    together = llm.generate([prompt.text for prompt in prompts], params, progress=False, on_step=display.show)
    seconds, steps = time.monotonic() - started, llm.engine.num_steps - first_step
    display.close()
    print(f"\ntogether: {_total(together)} output tokens in {steps} steps, {seconds:.1f} s")

    plain = LLM.from_model(llm.model, llm.tokenizer, max_rows=1, max_model_len=1024, speculate="none")
    started = time.monotonic()
    alone = [plain.generate(p.text, p.params, progress=False)[0] for p in prompts]
    seconds, steps = time.monotonic() - started, plain.engine.num_steps
    print(f"each alone, without drafts: {_total(alone)} output tokens in {steps} steps, {seconds:.1f} s\n")
    same = [_is_identical(a.outputs[0], b.outputs[0]) for a, b in zip(together, alone, strict=True)]
    _print_table(prompts, together, same)
    print(f"\n{sum(same)} of {len(same)} identical")
    return all(same)


def _dtype(llm: LLM) -> str:
    return str(llm.model.dtype).removeprefix("torch.")


def _total(outputs: Sequence[RequestOutput]) -> int:
    return sum(output.num_output_tokens for output in outputs)


def _is_identical(batch: CompletionOutput, alone: CompletionOutput) -> bool:
    """Whether tokens, text, reason and every log-probability are the same, bit for bit."""
    return (
        batch.token_ids == alone.token_ids
        and batch.text == alone.text
        and batch.finish_reason == alone.finish_reason
        and batch.error is None
        and batch.logprobs == alone.logprobs
    )


def _print_table(prompts: Sequence[DemoPrompt], outputs: Sequence[RequestOutput], same: Sequence[bool]) -> None:
    width = max(shutil.get_terminal_size((100, 24)).columns - 79, 20)
    print("prompt        prompt tokens  output tokens  per forward  draw     finish  identical to alone  completion")
    for prompt, output, is_same in zip(prompts, outputs, same, strict=True):
        choice = output.outputs[0]
        draw = "greedy" if prompt.seed is None else f"seed {prompt.seed}"
        print(
            f"{prompt.name:<13} {output.num_prompt_tokens:>13}  {len(choice.token_ids):>13}  "
            f"{1 + choice.num_accepted / max(1, choice.num_verifies):>11.2f}  {draw:<8} "
            f"{choice.finish_reason!s:<7} {'yes' if is_same else 'NO':<19} {_one_line(choice.text, width)}"
        )


def _one_line(text: str, width: int) -> str:
    """The beginning of a text on one line."""
    flat = text.encode("unicode_escape", "replace").decode("ascii")
    return flat if len(flat) <= width else flat[: width - 1] + "…"


class _Lines:
    """Says who takes and leaves a seat, one line each: for pipes and logs."""

    def __init__(self, llm: LLM, prompts: Sequence[DemoPrompt]) -> None:
        self.llm = llm
        self.name_of = {prompt.text: prompt.name for prompt in prompts}
        self.first_step = llm.engine.num_steps
        self.seats: dict[int, Row] = {}
        self.output_of: dict[int, int] = {}

    def advances(self) -> dict[int, int]:
        """Output tokens that each seat's row gained in this step; a row that just took its seat is not counted."""
        gained = {}
        for seat, row in self.seats.items():
            num_output = len(row.output_token_ids)
            gained[seat] = num_output - self.output_of.get(id(row), num_output)
            self.output_of[id(row)] = num_output
        return gained

    def show(self, finished: Sequence[Row]) -> None:
        """After a step: how far each row went, and which have left their seats."""
        gained = {seat: count for seat, count in self.advances().items() if count}
        if gained:
            self._say("  ".join(f"seat {seat} +{count}" for seat, count in sorted(gained.items())))
        for seat, row in list(self.seats.items()):
            if row.is_finished:
                self._say(f"seat {seat} left by {self._name(row)}: {len(row.output_token_ids)} tokens")
                del self.seats[seat]
        for row in self.llm.engine.scheduler.running:
            if row.slot not in self.seats:
                self.seats[row.slot] = row
                self._say(f"seat {row.slot} taken by {self._name(row)}: {len(row.request.prompt_token_ids)} to read")

    def close(self) -> None:
        """The batch is done."""

    def _name(self, row: Row) -> str:
        return repr(self.name_of[row.request.prompt])

    def _say(self, text: str) -> None:
        print(f"step {self.llm.engine.num_steps - self.first_step:>3}  {text}", flush=True)


class _Screen(_Lines):
    """Redraws one line per seat in place: for terminals."""

    def __init__(self, llm: LLM, prompts: Sequence[DemoPrompt]) -> None:
        super().__init__(llm, prompts)
        self.max_tokens = {prompt.text: prompt.max_tokens for prompt in prompts}
        self.drawn_at = 0.0
        self.num_drawn = 0
        self.num_done = 0
        self.gained: dict[int, int] = {}

    def show(self, finished: Sequence[Row]) -> None:
        """After a step: redraw unless the last drawing is only a moment old."""
        self.num_done += len(finished)
        self.gained = self.advances()
        self.seats = {row.slot: row for row in self.llm.engine.scheduler.running}
        if finished or time.monotonic() - self.drawn_at >= _REDRAW_SECONDS:
            self._draw()

    def close(self) -> None:
        """The batch is done: draw the empty seats."""
        self._draw()

    def _draw(self) -> None:
        columns = shutil.get_terminal_size((100, 24)).columns - 1
        scheduler = self.llm.engine.scheduler
        lines = [self._seat_line(seat, columns) for seat in range(scheduler.config.max_rows)]
        counts = f"{len(scheduler.running)} running, {len(scheduler.waiting)} waiting, {self.num_done} done"
        lines.append(f"step {self.llm.engine.num_steps - self.first_step}: {counts}")
        up = f"\x1b[{self.num_drawn}F" if self.num_drawn else ""
        sys.stdout.write(up + "".join(f"\x1b[2K{line[:columns]}\n" for line in lines))
        sys.stdout.flush()
        self.drawn_at, self.num_drawn = time.monotonic(), len(lines)

    def _seat_line(self, seat: int, columns: int) -> str:
        row = self.seats.get(seat)
        if row is None:
            return f"seat {seat}  free"
        prompt = row.request.prompt
        prompt_len, num_output = len(row.request.prompt_token_ids), len(row.output_token_ids)
        if num_output:
            what, done, total = "writes", num_output, self.max_tokens[prompt]
        else:
            what, done, total = "reads", row.kv_len, prompt_len
        filled = _BAR_WIDTH * done // total
        bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        head = f"seat {seat}  {self.name_of[prompt]:<12} position {row.num_tokens if num_output else row.kv_len:>4}  "
        head += f"{what:<6} [{bar}] {done:>3}/{total:<3} "
        head += f"+{self.gained.get(seat, 0)} "
        tail = row.text.text.encode("unicode_escape").decode("ascii")
        room = max(columns - len(head), 0)
        return head + (tail if len(tail) <= room else tail[len(tail) - room :])


def _display_for_stdout(llm: LLM, prompts: Sequence[DemoPrompt]) -> _Lines:
    return (_Screen if sys.stdout.isatty() else _Lines)(llm, prompts)
