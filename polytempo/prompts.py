"""What `LLM` takes for a prompt, and prompts as it uses them: text if there was one, and token ids.

Knows nothing of engines; whether a prompt fits is for `Engine.check_request` to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polytempo.errors import RequestError
from polytempo.tokenizer import Tokenizer
from polytempo.types import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or {"prompt": text} / {"prompt_token_ids": ids}."""


def listed_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (a text, a dict, or a non-empty list of token ids) or several, as a list.

    Args:
        prompts: as for `LLM.generate`.

    Returns:
        The prompts, not parsed yet.

    Raises:
        RequestError: neither a prompt nor a list.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts must be a prompt or a list of prompts, not {type(prompts).__name__}")
    is_one = bool(prompts) and all(isinstance(item, int) for item in prompts)
    return [prompts] if is_one else list(prompts)


def parse_prompt(prompt: Prompt, place: int, tokenizer: Tokenizer | None) -> tuple[str | None, list[int]]:
    """Text and token ids of one prompt.

    Args:
        prompt: in any of the forms of `Prompt`.
        place: where in the list it is, for messages.
        tokenizer: encodes text; None: only token ids can be served.

    Returns:
        Its text (None if token ids were given) and its token ids.

    Raises:
        RequestError: not a prompt, or a text without a tokenizer.
    """
    if isinstance(prompt, Mapping):
        keys = set(prompt)
        if keys == {"prompt"}:
            prompt = prompt["prompt"]
        elif keys == {"prompt_token_ids"}:
            prompt = prompt["prompt_token_ids"]
        else:
            raise RequestError(
                f"prompt {place} has the keys {sorted(map(str, keys))}; it needs either 'prompt' or 'prompt_token_ids'"
            )
    if isinstance(prompt, str):
        return prompt, need_tokenizer(tokenizer, f"prompt {place} is text, which").encode(prompt)
    ids = list(prompt) if isinstance(prompt, Sequence) else None
    if ids is None or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise RequestError(
            f"prompt {place} must be text or a list of token ids, not {type(prompt).__name__} {prompt!r:.60}"
        )
    return None, ids


def spread_params(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    """One SamplingParams per prompt.

    Args:
        params: one for all, one per prompt, or None for the defaults.
        num_prompts: prompts that there are.

    Returns:
        As many as there are prompts; what each is has not been checked.

    Raises:
        RequestError: a list of another length than the prompts.
    """
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    params = list(params)
    if len(params) != num_prompts:
        raise RequestError(f"{len(params)} params for {num_prompts} prompts; give one for all or one per prompt")
    return params


def need_tokenizer(tokenizer: Tokenizer | None, what: str) -> Tokenizer:
    """The tokenizer, insisted on.

    Args:
        tokenizer: the model's, or None.
        what: whatever needs it; begins the message.

    Returns:
        The tokenizer.

    Raises:
        RequestError: there is none.
    """
    if tokenizer is None:
        raise RequestError(
            f"{what} needs a tokenizer and the model directory has no tokenizer.json; pass tokenizer=DIR, or use "
            "token ids without text options"
        )
    return tokenizer
