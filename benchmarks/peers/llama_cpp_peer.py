"""Speed of llama.cpp through llama-cpp-python's C interface: rows of one length, greedy.

    python benchmarks/peers/llama_cpp_peer.py DIR/model.gguf -b 1,8,32 [--prompt-lens 256,2048] [--threads 2]

It computes with what is in the file, whatever --dtype says: to_gguf.py keeps the experts in fp4 and the rest in
bfloat16, so less is read per token than by engines that hold all weights in bfloat16. Prints a JSON object per figure,
see common.py.
"""

from __future__ import annotations

import time
from pathlib import Path

import llama_cpp as lc
import numpy as np
from common import VOCAB_SIZE, Work, decode_figures, prompts, read_work, report

UBATCH = 512  # llama.cpp's own default: prompt tokens that it computes at once


class Context:
    """Rows in a context of their own.

    Args:
        model: a loaded llama_model.
        rows: how many.
        tokens: most of each.
        threads: None is llama.cpp's default.

    Raises:
        RuntimeError: llama.cpp refuses.
    """

    def __init__(self, model, rows: int, tokens: int, threads: int | None) -> None:
        params = lc.llama_context_default_params()
        params.n_ctx, params.n_seq_max = rows * (-(-tokens // 256) * 256), rows
        params.n_batch, params.n_ubatch = max(UBATCH, rows * tokens), UBATCH
        if threads is not None:
            params.n_threads = params.n_threads_batch = threads
        self.handle = lc.llama_init_from_model(model, params)
        if not self.handle:
            raise RuntimeError(f"llama_init_from_model refuses {rows} rows of {tokens} tokens")
        self.batch = lc.llama_batch_init(params.n_batch, 0, 1)

    def forward(self, ids: list[list[int]], start: int) -> list[int]:
        """The tokens ids[row] of every row from `start` on; the likeliest token after each row's last."""
        place, last = 0, []
        for row, tokens in enumerate(ids):
            for offset, token_id in enumerate(tokens):
                self.batch.token[place], self.batch.pos[place] = token_id, start + offset
                self.batch.n_seq_id[place], self.batch.seq_id[place][0] = 1, row
                self.batch.logits[place] = offset == len(tokens) - 1
                place += 1
            last.append(place - 1)
        self.batch.n_tokens = place
        if code := lc.llama_decode(self.handle, self.batch):
            raise RuntimeError(f"llama_decode returned {code}")
        logits = (lc.llama_get_logits_ith(self.handle, place) for place in last)
        return [int(np.ctypeslib.as_array(one, (VOCAB_SIZE,)).argmax()) for one in logits]

    def close(self) -> None:
        """Free everything."""
        lc.llama_batch_free(self.batch)
        lc.llama_free(self.handle)


def decode(model, work: Work, batch: int) -> dict:
    """Prefill, then single-token steps."""
    context = Context(model, batch, work.prompt_len + work.max_tokens, work.threads)
    started = time.perf_counter()
    tokens = context.forward(prompts(batch, work.prompt_len), 0)
    prefill_seconds, steps = time.perf_counter() - started, []
    for place in range(work.max_tokens):
        started = time.perf_counter()
        tokens = context.forward([[token] for token in tokens], work.prompt_len + place)
        steps.append(time.perf_counter() - started)
    context.close()
    return decode_figures(batch, work.prompt_len, prefill_seconds, steps)


def prefill(model, work: Work, length: int) -> float:
    """Seconds of one prompt up to its first token."""
    context = Context(model, 1, length, work.threads)
    started = time.perf_counter()
    context.forward(prompts(1, length), 0)
    seconds = time.perf_counter() - started
    context.close()
    return seconds


def main() -> None:
    """Command line."""
    work = read_work(__doc__)
    if not Path(work.checkpoint).exists():
        raise SystemExit(f"there is no {work.checkpoint}; to_gguf.py writes it")
    lc.llama_backend_init()
    params = lc.llama_model_default_params()
    params.n_gpu_layers = 0
    model = lc.llama_model_load_from_file(work.checkpoint.encode(), params)
    if not model:
        raise SystemExit(f"llama.cpp cannot load {work.checkpoint}")
    report("llama.cpp", work, lambda batch: decode(model, work, batch), lambda length: prefill(model, work, length),
           dtype="fp4+bfloat16")  # fmt: skip


if __name__ == "__main__":
    main()
