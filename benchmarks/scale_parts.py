"""What scale.py measures, a function for each part; every figure is {"median", "min", "max", "runs"}."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from loading import load_runs

from polytempo import LLM, SamplingParams
from polytempo.bench.run import Measurement, Mode, measure
from polytempo.bench.workload import prompts
from polytempo.cache.layout import Segment, StateShape, live_bytes
from polytempo.cache.store import RowStore
from polytempo.engine_config import EngineConfig
from polytempo.model.deepseek_v4 import DeepseekV4
from polytempo.model.forward import target_forward
from polytempo.model.rope import RopeTables

STEPS = 15  # decode steps in one run of the context part, whose median is the run's figure
PROMPT_LENS = (32, 100, 64, 200)
DRAFT_ROWS = 8


def figure(values: Iterable[float]) -> dict[str, float]:
    """Median and range of some runs."""
    ranked = sorted(values)
    return {"median": statistics.median(ranked), "min": ranked[0], "max": ranked[-1], "runs": len(ranked)}


def machine(threads: int) -> dict[str, object]:
    """Where a figure was taken."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"processor": names[0] if names else platform.processor(), "cores": cores, "threads": threads,
            "torch": torch.__version__, "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d %H:%M")}  # fmt: skip


def filled_store(model: DeepseekV4, rows: int, context: int) -> tuple[RowStore, StateShape]:
    """State of rows that hold `context` tokens, of random numbers."""
    limits = EngineConfig(max_rows=rows, max_model_len=context + 1, max_step_tokens=max(1024, rows))
    shape = StateShape.build(model.config, limits)
    store = RowStore.allocate(shape, rows, model.dtype)
    for slot in range(rows):
        store.pool.reserve(slot, context + 1)
    store.fit()
    for layer in (*store.layers, *store.mtp):
        for tensor in (*layer.per_slot(), *(state.entries for state in layer.pooled)):
            tensor.normal_()
    store.mtp_streams.normal_()
    return store, shape


@torch.inference_mode()
def context_step(model: DeepseekV4, contexts: Sequence[int], repeat: int) -> dict[str, dict]:
    """Milliseconds of a step of one row after so many tokens, logits included.

    The state is filled with random numbers instead of a prefill: a step's time does not depend on their values, but
    for which entries the indexer chooses.
    """
    result = {}
    for context in contexts:
        store, _ = filled_store(model, 1, context)
        tables = RopeTables.build(model.config, context + 1)

        def step(store: RowStore = store, tables: RopeTables = tables, context: int = context) -> None:
            view = store.target_view([Segment(0, context, [5])], model.config.compress_ratios)
            model.logits(target_forward(model, tables, store, view))

        step()
        result[str(context)] = figure(statistics.median(_ms(step) for _ in range(STEPS)) for _ in range(repeat))
    return {"step_ms": result}


def _ms(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return (time.perf_counter() - started) * 1e3


def _give_back() -> None:
    """Return freed memory to the system: state that is made in it would not make this process grow."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def _resident_bytes() -> int | None:
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else None


def cache_bytes(model: DeepseekV4, contexts: Sequence[int], repeat: int) -> dict[str, dict]:
    """State of one row per token: resident memory, tensors by kind, and what `live_bytes` says it must take.

    "tensors" exceeds "formula" by blocks that are not full and by what a pool grows ahead; "resident" is the growth of
    this process when the state is made and filled.
    """
    result: dict[str, dict] = {"resident": {}, "tensors": {}, "formula": {}, "parts": {}}
    for context in contexts:
        resident = []
        for _ in range(repeat + 1):
            store = None
            gc.collect()
            _give_back()
            before = _resident_bytes()
            store, shape = filled_store(model, 1, context)
            _give_back()  # what filling needed besides
            if before is not None:
                resident.append((_resident_bytes() - before) / context)
        itemsize, key = model.dtype.itemsize, str(context)
        if resident:
            result["resident"][key] = figure(resident[1:])
        result["tensors"][key] = store.num_bytes / context
        result["formula"][key] = live_bytes(shape, [context], 1, itemsize) / context
        result["parts"][key] = {name: size / context for name, size in _parts(store).items()}
    return {"bytes_per_token": result}


def _parts(store: RowStore) -> dict[str, int]:
    """Bytes of the state's tensors by kind."""
    layers = (*store.layers, *store.mtp)
    pooled = [state for layer in layers for state in layer.pooled]
    index = [layer.index for layer in layers if layer.index is not None]
    compressed = [layer.compressed for layer in layers if layer.compressed is not None]
    return {
        "raw keys": sum(layer.window.nbytes for layer in layers),
        "compressor and indexer inputs": sum(state.kv.nbytes + state.gate.nbytes for state in pooled),
        "entries": sum(state.entries.nbytes for state in compressed),
        "indexer keys": sum(state.entries.nbytes for state in index),
        "streams": store.mtp_streams.nbytes,
    }


def _decode(
    base: LLM, rows: int, draft_len: int, max_tokens: int, scripted: tuple[float, Sequence] | None = None
) -> Measurement:
    work = prompts(base.tokenizer, base.model.config.vocab_size, PROMPT_LENS, rows, seed=0)
    mode = Mode(draft_len)
    llm = LLM.from_model(
        base.model, base.tokenizer, max_rows=rows, max_model_len=max(PROMPT_LENS) + max_tokens,
        speculate=mode.speculate, draft_len=draft_len, max_step_tokens=max(1024, rows * (draft_len + 1)),
    )  # fmt: skip
    return measure(llm, mode, [work], max_tokens, scripted)


def batch_step(base: LLM, batches: Sequence[int], max_tokens: int, repeat: int) -> dict[str, dict]:
    """Milliseconds per step and tokens per second of so many rows, without drafts."""
    step_ms, speed = {}, {}
    for rows in batches:
        runs = [_decode(base, rows, 0, max_tokens) for _ in range(repeat)]
        step_ms[str(rows)] = figure(statistics.median(run.step_ms) for run in runs)
        speed[str(rows)] = figure(run.tokens_per_second for run in runs)
    return {"step_ms": step_ms, "tokens_per_second": speed}


def draft_speed(
    base: LLM, draft_lens: Sequence[int], max_tokens: int, acceptance: float, repeat: int
) -> dict[str, dict]:
    """Tokens per second of DRAFT_ROWS rows by draft length: drafts of the MTP block, and scripted ones.

    Draft lengths take turns. Exits if a run emits other tokens than the first without drafts.
    """
    reference = _decode(base, DRAFT_ROWS, 0, max_tokens).outputs
    kinds = {"scripted": (acceptance, reference)}
    if base.model.config.num_mtp_blocks:
        kinds = {"own": None, **kinds}
    runs: dict[tuple[str, int], list[Measurement]] = {}
    for _ in range(repeat):
        for kind, script in kinds.items():
            for draft_len in draft_lens:
                # A script needs a checkpoint that can draft only to be allowed a draft length.
                run = _decode(base, DRAFT_ROWS, draft_len, max_tokens, script)
                if run.outputs != reference:
                    sys.exit(f"{kind} drafts of {draft_len}: other tokens than without drafts")
                runs.setdefault((kind, draft_len), []).append(run)
    result: dict[str, dict] = {"scripted_acceptance": acceptance, "rows": DRAFT_ROWS}
    for (kind, draft_len), taken in runs.items():
        result.setdefault(kind, {})[str(draft_len)] = {
            "tokens_per_second": figure(run.tokens_per_second for run in taken),
            "step_ms": figure(statistics.median(run.step_ms) for run in taken),
            "tokens_per_forward": taken[0].tokens_per_forward,
            "acceptance": taken[0].acceptance,
        }
    return result


def prefill_speed(base: LLM, prompt_lens: Sequence[int], repeat: int) -> dict[str, dict]:
    """Prompt tokens per second of one row, up to its first token."""
    result = {}
    for length in prompt_lens:
        llm = LLM.from_model(base.model, None, max_rows=1, max_model_len=length + 2, speculate="none")
        prompt = prompts(None, base.model.config.vocab_size, [length], 1, seed=0)[0]
        once = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        llm.generate([prompt[:64]], once, progress=False)
        run = partial(llm.generate, [prompt], once, progress=False)
        result[str(length)] = figure(1e3 * length / _ms(run) for _ in range(repeat))
    return {"tokens_per_second": result}


def loading(folder: Path, dtypes: Sequence[str], repeat: int) -> dict[str, dict]:
    """Seconds and peak memory of loading a checkpoint, each time in a process of its own."""
    result = {}
    for dtype in dtypes:
        runs = load_runs(folder, dtype, repeat)
        result[dtype] = {
            "seconds": figure(run["seconds"] for run in runs),
            "peak_bytes": figure(run["peak_bytes"] for run in runs),
            "weight_bytes": runs[0]["weight_bytes"],
        }
    return result
