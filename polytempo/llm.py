"""The Python API: load a model, generate for a list of prompts, chat."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from polytempo.checkpoint.live import share_transformers_model
from polytempo.checkpoint.load import load_model
from polytempo.device import resolve_device
from polytempo.engine.bad_words import BadWords, bad_word_token_ids
from polytempo.engine.engine import Engine
from polytempo.engine.grammar import GrammarCompiler
from polytempo.engine.noise import resolve_seed
from polytempo.engine.outputs import request_output
from polytempo.engine.row import Request, Row
from polytempo.engine.text import OutputText
from polytempo.engine_config import TORCH, TRITON, EngineConfig
from polytempo.errors import ConfigError, RequestError
from polytempo.model.deepseek_v4 import DeepseekV4
from polytempo.model.ops import require_triton
from polytempo.prompts import Prompt, listed_prompts, need_tokenizer, parse_prompt, spread_params
from polytempo.tokenizer import Tokenizer
from polytempo.types import RequestOutput, SamplingParams

DEMO_MODEL = Path(__file__).parent / "demo_model"
DEFAULT_MAX_MODEL_LEN = 4096


class LLM:
    """A loaded model with an engine: every prompt's output is what it would be alone.

    Args:
        model: checkpoint directory, official or Hugging Face form; None is the demo model in the package.
        dtype: "auto" (the checkpoint's), "float32" or "bfloat16".
        device: where weights and state live: "cpu", "cuda", "cuda:1", or "auto", which is "cuda" where there is one.
        tokenizer: directory with tokenizer.json if it is not the model's own; False for none.
        progress: show a bar while loading.
        weights: "expanded" to `dtype`, "packed", as the checkpoint stores them, or "auto", the faster of both where the
            engine runs in C++ kernels; see `load_model`. Tokens are the same.
        **options: the fields of `EngineConfig`: max_rows, max_model_len, memory, speculate, draft_len, kernels, …

    Raises:
        CheckpointError: the checkpoint is broken; the message names file and tensor.
        ConfigError: an option is unknown (the nearest is suggested) or out of range, or the device, or the kernels on
            it, cannot be used.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "cpu",
        tokenizer: str | Path | bool | None = None,
        progress: bool = True,
        weights: str = "auto",
        **options: Any,
    ) -> None:
        # Refuses before a model is read.
        config, device = EngineConfig.from_options(options), resolve_device(device)
        if config.kernels == "native" and device.type != "cpu":
            raise ConfigError(
                f"option 'kernels' is 'native', but option 'device' is {str(device)!r}, and the C++ kernels run on the "
                "CPU; use kernels='auto' or 'torch'"
            )
        if config.kernels == TRITON:
            require_triton(device)
        if weights == "auto" and (config.kernels in (TORCH, TRITON) or config.kv_layout != "ring"):
            weights = "expanded"  # C++ kernels will not run, and torch would expand packed ones at every use
        path = DEMO_MODEL if model is None else Path(model)
        must_speculate = config.speculate == "mtp"
        loaded_model, self.checkpoint = load_model(path, dtype, device, must_speculate, progress, weights)
        loaded = None
        if tokenizer is not False:
            home = path if tokenizer in (None, True) else Path(tokenizer)
            if tokenizer is not None or (home / "tokenizer.json").exists():
                loaded = Tokenizer.from_dir(home)
        self._start(loaded_model, loaded, options)

    @classmethod
    def from_transformers(cls, model: Any, tokenizer: Any = None, **options: Any) -> LLM:
        """Wrap a live transformers DeepseekV4ForCausalLM, sharing its memory.

        Args:
            model: the transformers model; norms and routers may be copied to float32, the rest is shared.
            tokenizer: its fast tokenizer, a polytempo Tokenizer, or None (token ids in, token ids out).
            **options: engine options, as for LLM.

        Returns:
            An LLM that cannot speculate, since transformers drops the MTP block.

        Raises:
            ConfigError: as for LLM, or the model has parts that polytempo does not know.
        """
        if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
            tokenizer = Tokenizer.from_transformers(tokenizer)
        return cls.from_model(share_transformers_model(model), tokenizer, **options)

    @classmethod
    def from_model(cls, model: DeepseekV4, tokenizer: Tokenizer | None = None, **options: Any) -> LLM:
        """Start an engine of its own over weights that are loaded already.

        Args:
            model: the weights; several LLMs may share them.
            tokenizer: None means token ids in, token ids out.
            **options: engine options, as for LLM.

        Returns:
            An LLM.

        Raises:
            ConfigError: as for LLM.
        """
        llm = cls.__new__(cls)
        llm.checkpoint = None
        llm._start(model, tokenizer, options)
        return llm

    def _start(self, model: DeepseekV4, tokenizer: Tokenizer | None, options: Mapping[str, Any]) -> None:
        limit = min(DEFAULT_MAX_MODEL_LEN, model.config.max_position_embeddings)
        given = {name: value for name, value in options.items() if value is not None}
        config = EngineConfig.from_options(_consistent({"max_model_len": limit, **given}))
        self.model, self.tokenizer = model, tokenizer
        self.engine = Engine(model, config)
        self._request_ids = itertools.count()
        self._grammars = GrammarCompiler(tokenizer, model.config)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
        on_step: Callable[[list[Row]], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; more than max_rows run in turn, seats refilled as sequences finish.

        Args:
            prompts: one prompt or a list of them.
            params: one for all, or one per prompt; None is SamplingParams().
            progress: show a bar on stderr.
            on_step: called after every step with the rows that finished in it; `engine` shows the others.

        Returns:
            One output per prompt, in order. A request that fails while it runs has finish_reason "error" and says
            why; its neighbours are unaffected.

        Raises:
            RequestError: a prompt or an option cannot be served; nothing has run yet.
        """
        parsed = [parse_prompt(prompt, place, self.tokenizer) for place, prompt in enumerate(listed_prompts(prompts))]
        pairs = zip(parsed, spread_params(params, len(parsed)), strict=True)
        return self._run([self._request(*item, one) for item, one in pairs], progress, on_step)

    def check(self, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """Refuse what `generate` would refuse, without running anything.

        Args:
            prompt: one prompt.
            params: None is SamplingParams().

        Raises:
            RequestError: the prompt or an option cannot be served.
        """
        self.rows_of(prompt, params)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them through the tokenizer's chat template.

        Args:
            messages: [{"role": …, "content": …}, …], or a list of such lists.
            params: as for `generate`.
            progress: as for `generate`.

        Returns:
            One output per conversation.

        Raises:
            RequestError: as `generate`; also if there is no tokenizer or no template.
        """
        tokenizer = need_tokenizer(self.tokenizer, "chat")
        many = bool(messages) and not isinstance(messages[0], Mapping)
        conversations = messages if many else [messages]
        return self.generate([tokenizer.apply_chat_template(one) for one in conversations], params, progress)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[str, None, RequestOutput]:
        """Complete one prompt, yielding text as it becomes certain (never part of a stop string).

        Args:
            prompt: as for `generate`.
            params: n must be 1.

        Yields:
            Pieces of text; joined they are the output's text.

        Returns:
            The whole output, as the generator's value.

        Raises:
            RequestError: as `generate`.
        """
        need_tokenizer(self.tokenizer, "stream")
        rows = self.rows_of(prompt, params)
        if len(rows) != 1:
            raise RequestError(f"stream needs n=1, not {len(rows)}")
        self.engine.add(rows)
        try:
            shown = 0
            while self.engine.has_work and not rows[0].is_finished:
                self.engine.step()
                text = rows[0].text.text
                if len(text) > shown:
                    yield text[shown:]
                    shown = len(text)
            if len(rows[0].text.text) > shown:  # what steps of another caller brought last
                yield rows[0].text.text[shown:]
        finally:
            self.engine.abort(rows[0].request.request_id)
        if rows[0].error is not None:
            raise RequestError(f"request failed at {rows[0].error}")
        return request_output(rows, self.decode_token)

    def rows_of(
        self, prompt: Prompt, params: SamplingParams | None = None, priority: int = 0, timeout: float | None = None
    ) -> list[Row]:
        """The checked rows of one request, for callers that drive `engine` themselves; any thread may call it.

        Args:
            prompt: one prompt.
            params: None is SamplingParams().
            priority: of requests that wait for a seat, the lowest goes first.
            timeout: seconds from now after which the request is given up; None is never.

        Returns:
            One row per choice; `engine.add` queues them.

        Raises:
            RequestError: the prompt or an option cannot be served.
        """
        rows = self._request(*parse_prompt(prompt, 0, self.tokenizer), params or SamplingParams())
        request = rows[0].request
        request.priority = priority
        request.deadline = None if timeout is None else request.arrival + timeout
        return rows

    def _run(
        self, requests: list[list[Row]], progress: bool, on_step: Callable[[list[Row]], None] | None
    ) -> list[RequestOutput]:
        total = sum(len(rows) for rows in requests)
        try:
            for rows in requests:
                self.engine.add(rows)
            with tqdm(total=total, unit="seq", desc="generating", disable=not progress, delay=0.5) as bar:
                num_tokens = 0
                while self.engine.has_work:
                    finished = self.engine.step()
                    if on_step is not None:
                        on_step(finished)
                    for row in finished:
                        num_tokens += len(row.output_token_ids)
                        bar.set_postfix(tokens=num_tokens, refresh=False)
                        bar.update()
        finally:
            # A call that is interrupted or refused must not leave rows behind for the next one.
            for rows in requests:
                self.engine.abort(rows[0].request.request_id)
        return [request_output(rows, self.decode_token) for rows in requests]

    @property
    def decode_token(self) -> Callable[[int], str] | None:
        """Token id -> text of that token alone, special tokens too; None without a tokenizer."""
        tokenizer = self.tokenizer
        return None if tokenizer is None else lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False)

    def _request(self, prompt: str | None, ids: list[int], params: SamplingParams) -> list[Row]:
        """The rows of one request, checked."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, not {type(params).__name__}")
        eos = () if params.ignore_eos else self.model.config.eos_token_ids
        words: Sequence[Sequence[int]] = ()
        if params.bad_words:
            tokenizer = need_tokenizer(self.tokenizer, "bad_words")
            words = bad_word_token_ids(params.bad_words, lambda word: tokenizer.encode(word, add_special_tokens=False))
        if params.stop:
            need_tokenizer(self.tokenizer, "stop")
        request = Request(
            request_id=f"request-{next(self._request_ids)}",
            prompt=prompt,
            prompt_token_ids=ids,
            params=params,
            seed=resolve_seed(params.seed),
            stop_token_ids=frozenset((*eos, *(params.stop_token_ids or ()))),
            bad_words=BadWords.of(words),
            arrival=time.monotonic(),
        )
        self.engine.check_request(request)
        rows = [Row(request, choice) for choice in range(params.n)]
        compiled = self._grammars.compile(params) if params.has_grammar else None
        for row in rows:
            row.text = OutputText(self.tokenizer, params) if self.tokenizer is not None and params.detokenize else None
            row.grammar = None if compiled is None else compiled.new_state()
        return rows


def _consistent(options: dict[str, Any]) -> dict[str, Any]:
    """Let max_step_tokens follow max_rows unless it was given."""
    rows = options.get("max_rows")
    if rows is not None and "max_step_tokens" not in options:
        if isinstance(rows, bool) or not isinstance(rows, int):
            raise ConfigError(f"engine option 'max_rows' is {rows!r}; it must be an integer of at least 1")
        options["max_step_tokens"] = max(EngineConfig.max_step_tokens, rows)
    return options
