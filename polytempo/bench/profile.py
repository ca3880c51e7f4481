"""Where the time of a decode step goes: by part of the C++ kernels, by operator of torch, or by kernel of a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

from polytempo.bench.run import Mode
from polytempo.device import describe_device
from polytempo.engine.engine import Engine
from polytempo.engine.stats import StepSeconds
from polytempo.errors import ConfigError
from polytempo.kernels.profile import part_seconds
from polytempo.llm import LLM
from polytempo.model.forward import uses_kernels
from polytempo.types import SamplingParams

WARM_STEPS = 5
OTHER = "torch and Python"
MOST_PARTS = 20


@dataclass
class Profile:
    """Milliseconds of one step, a mean over steps in which every row decoded.

    Attributes:
        mode: how it decoded.
        device: its name.
        batch: rows.
        steps: that were timed.
        step_ms: all of a step.
        phases: of it, by phase of the engine; their sum is step_ms.
        parts: of it, by part of the kernels, by torch operator, or by kernel that a device ran, longest first; "torch
            and Python" is what no part accounts for.
        in_kernels: whether parts are those of the kernels.
    """

    mode: Mode
    device: str
    batch: int
    steps: int
    step_ms: float
    phases: dict[str, float]
    parts: dict[str, float]
    in_kernels: bool


def profile(llm: LLM, mode: Mode, prompts: Sequence[Sequence[int]], steps: int) -> Profile:
    """Decode `steps` steps of one batch under timers.

    Args:
        llm: with at least as many rows as prompts, built for this mode's options.
        mode: label and draft length.
        prompts: one per row.
        steps: at least 1; every row must have room for them.

    Returns:
        The profile.

    Raises:
        ConfigError: a row ended before there was a step to time.
    """
    engine = llm.engine
    params = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=engine.config.max_model_len)
    rows = [llm.rows_of(list(prompt), params)[0] for prompt in prompts]
    engine.add(rows)
    while not all(row.is_decoding for row in rows):
        engine.step()
    for _ in range(WARM_STEPS):
        engine.step()
    in_kernels = uses_kernels(engine.target.model, engine.target.store.target_windows)
    engine.seconds, done = StepSeconds(), 0
    with _timers(engine, in_kernels) as seconds:
        while done < steps and not any(row.is_finished for row in rows):
            engine.step()
            done += 1
    for row in rows:
        engine.abort(row.request.request_id)
    if not done:
        raise ConfigError(
            f"a row ended within the {WARM_STEPS} steps before the first timed one; --max-tokens must be larger"
        )
    total = engine.seconds.total
    parts = dict(sorted(seconds.items(), key=lambda part: -part[1])[:MOST_PARTS])
    parts[OTHER] = max(0.0, total - sum(parts.values()))

    def per_step(named: dict[str, float]) -> dict[str, float]:
        return {name: value / done * 1e3 for name, value in named.items()}

    phases, device = per_step(asdict(engine.seconds)), describe_device(llm.model.device)
    return Profile(mode, device, len(rows), done, total / done * 1e3, phases, per_step(parts), in_kernels)


@contextmanager
def _timers(engine: Engine, in_kernels: bool) -> Iterator[dict[str, float]]:
    """Seconds by part, filled in when the block ends."""
    if in_kernels:
        with part_seconds(engine.target.model.native.library) as seconds:
            yield seconds
        return
    operators: dict[str, float] = {}
    on_device = engine.target.store.device.type == "cuda"
    kind = torch.profiler.ProfilerActivity.CUDA if on_device else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as recorded:
        yield operators
    field = "self_device_time_total" if on_device else "self_cpu_time_total"
    operators |= {event.key: getattr(event, field) / 1e6 for event in recorded.key_averages()}


def profile_table(found: Profile) -> str:
    """Text: phases, then parts with their share of the step."""
    kind = "kernel of the device" if found.device.startswith("cuda") else "torch operator, its own time"
    kind = "part of the kernels" if found.in_kernels else kind
    phases = ", ".join(f"{name} {ms:.2f}" for name, ms in found.phases.items())
    lines = [f"{found.mode.name}, {found.batch} rows: {found.step_ms:.2f} ms a step (mean of {found.steps}): {phases}"]
    lines.append(f"  {kind:<32} {'ms':>8}  share")
    lines += [f"  {name:<32.32} {ms:8.3f}  {ms / found.step_ms:5.1%}" for name, ms in found.parts.items()]
    return "\n".join(lines)
