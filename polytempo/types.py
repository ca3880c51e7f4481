"""What a client asks for and what it gets back: frozen, validated where they are born, no torch.

Knows nothing of models, rows or caches. Everything refused here is refused at the door, before a request can
disturb its neighbours.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, wraps
from numbers import Integral, Real

import numpy as np

from polytempo.errors import RequestError, unknown_option
from polytempo.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput, RequestTimings

__all__ = [
    "GRAMMAR_OPTIONS",
    "MAX_BIAS",
    "SEED_MAX",
    "SEED_MIN",
    "CompletionOutput",
    "FinishReason",
    "Logprob",
    "RequestOutput",
    "RequestTimings",
    "SamplingParams",
]

SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
MAX_BIAS = 100.0

# name: (test, what would be right). The tests never see NaN or inf: `_real` refuses those first.
_REAL_RULES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda x: x >= 0, ">= 0 (0 is greedy)"),
    "top_p": (lambda x: 0 < x <= 1, "in (0, 1] (1 is off)"),
    "min_p": (lambda x: 0 <= x <= 1, "in [0, 1] (0 is off)"),
    # Beyond, a float32 logit would become inf, or NaN where it is 0.
    "repetition_penalty": (lambda x: 1e-20 <= x <= 1e20, "in [1e-20, 1e20] (1 is off)"),
    "presence_penalty": (lambda x: -2 <= x <= 2, "in [-2, 2] (0 is off)"),
    "frequency_penalty": (lambda x: -2 <= x <= 2, "in [-2, 2] (0 is off)"),
}
# name: (smallest, largest, whether None is allowed, remark).
_INT_RULES: dict[str, tuple[int, int | None, bool, str]] = {
    "n": (1, None, False, ""),
    "top_k": (-1, None, False, " (0 or -1 is off)"),
    "seed": (SEED_MIN, SEED_MAX, True, " (None draws a fresh one)"),
    "min_tokens": (0, None, False, ""),
    "max_tokens": (1, None, True, " (None fills the context)"),
    "logprobs": (0, None, True, " (None is off, 0 gives the chosen token only)"),
    "draft_len": (0, None, True, " (None is the engine's)"),
    "prompt_logprobs": (0, None, True, " (None is off, 0 gives the prompt's own tokens only)"),
}
MOST_STOPS, LONGEST_STOP = 128, 256
"""Every output token is held against every stop string and its beginnings, while the other rows wait."""
_BOOLS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize", "json_object")
GRAMMAR_OPTIONS = ("json_object", "json_schema", "regex", "grammar")


def _refusal(name: str, value: object, right: str) -> RequestError:
    return RequestError(f"SamplingParams {name}={reprlib.repr(value)} is refused; {name} must be {right}", param=name)


def _real(name: str, value: object, right: str) -> float:
    """`value` as a finite float; NaN passes tests such as `x < 0 or x > 2`, so it is refused by itself."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _refusal(name, value, f"a number {right}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _refusal(name, value, f"a finite number {right}")
    return number


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _integer(name: str, value: object) -> int | None:
    low, high, optional, remark = _INT_RULES[name]
    if value is None and optional:
        return None
    right = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
    if not _is_int(value) or value < low or (high is not None and value > high):
        raise _refusal(name, value, right + remark)
    return int(value)


def _items(name: str, value: object, right: str) -> tuple:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, (Sequence, set, frozenset)):
        raise _refusal(name, value, right)
    return tuple(sorted(value, key=str)) if isinstance(value, (set, frozenset)) else tuple(value)


def _token_ids(name: str, value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    right = "None or a list of token ids (integers >= 0)"
    ids = _items(name, value, right)
    if not all(_is_int(token_id) and token_id >= 0 for token_id in ids):
        raise _refusal(name, value, right)
    return tuple(int(token_id) for token_id in ids)


def _is_text(value: object) -> bool:
    # Half of a surrogate pair is allowed in a str, but no tokenizer and no grammar takes it.
    return isinstance(value, str) and bool(value) and not any("\ud800" <= sign <= "\udfff" for sign in value)


def _strings(name: str, value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    right = "None or a list of strings, none of them empty"
    strings = _items(name, value, right)
    if not all(map(_is_text, strings)):
        raise _refusal(name, value, right)
    return strings


def _stops(value: object) -> tuple[str, ...] | None:
    strings = _strings("stop", [value] if isinstance(value, str) else value)
    if strings and (len(strings) > MOST_STOPS or max(map(len, strings)) > LONGEST_STOP):
        raise _refusal("stop", value, f"at most {MOST_STOPS} strings of at most {LONGEST_STOP} characters")
    return strings


def _logit_bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    right = f"None or a dict from token ids (integers >= 0) to biases in [{-MAX_BIAS:g}, {MAX_BIAS:g}]"
    if not isinstance(value, Mapping):
        raise _refusal("logit_bias", value, right)
    biases: dict[int, float] = {}
    for token_id, bias in value.items():
        if not _is_int(token_id) or token_id < 0:
            raise _refusal("logit_bias", value, right)
        biases[int(token_id)] = _real("logit_bias", bias, f"in [{-MAX_BIAS:g}, {MAX_BIAS:g}]")
        if abs(biases[int(token_id)]) > MAX_BIAS:
            raise _refusal("logit_bias", value, right)
    return biases


def _json_schema(value: object) -> str | None:
    """A JSON schema as text: frozen and hashable, whichever form it came in."""
    if value is None:
        return None
    right = "None or a JSON schema, as an object or as its JSON text"
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError):
        raise _refusal("json_schema", value, right) from None
    if not isinstance(schema, (Mapping, bool)):
        raise _refusal("json_schema", value, right)
    return text


def _text(name: str, value: object) -> str | None:
    if value is not None and not _is_text(value):
        raise _refusal(name, value, "None or a non-empty string")
    return value


def _refuse_unknown_options(cls: type) -> type:
    """Make a dataclass answer a misspelt option with the nearest right one, not with a bare TypeError."""
    known = {f.name for f in fields(cls)}
    generated = cls.__init__

    @wraps(generated)
    def __init__(self, **options):
        for name in options:
            if name not in known:
                raise RequestError(unknown_option(f"{cls.__name__} option", name, known), param=name)
        generated(self, **options)

    cls.__init__ = __init__
    return cls


@_refuse_unknown_options
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled, stopped and reported; names and defaults are vLLM's.

    Lists are kept as tuples, so that what was validated cannot change. Options act in this order:
    allowed_token_ids, grammar, bad_words, min_tokens, logit_bias, penalties, temperature, min_p, top_k, top_p.

    Attributes:
        n: choices per request; choice c draws from the noise stream (seed, c).
        temperature: 0 is greedy: the highest logit, the lowest id among equals.
        top_k: keep the k most likely tokens, of equals the lowest ids; 0 or -1 is off, above the vocabulary
            means the vocabulary.
        top_p: keep the smallest set of most likely tokens whose joint probability reaches top_p.
        min_p: keep tokens at least min_p times as likely as the most likely one.
        seed: noise seed, 64 bits signed; None draws a fresh one per request.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output, in
            [1e-20, 1e20].
        presence_penalty: subtracted from the logits of tokens that occur in the output.
        frequency_penalty: subtracted once per occurrence in the output.
        logit_bias: token id -> number in [-100, 100] added to its logit.
        allowed_token_ids: the only tokens that may be drawn.
        bad_words: strings whose tokenisation must not be completed.
        min_tokens: output tokens before EOS, stop ids and stop strings may end the output.
        max_tokens: most output tokens; None fills the context.
        stop: string or strings that end the output, at most 128 of 256 characters; the text is cut before the match.
        stop_token_ids: token ids that end the output.
        include_stop_str_in_output: keep the matched stop in the text.
        ignore_eos: do not end at EOS.
        logprobs: raw log-probabilities of the chosen and so many top tokens; None is off, 0 is not.
        prompt_logprobs: the same for the prompt's tokens.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: make text at all; stop and bad_words need a tokenizer either way.
        draft_len: most drafts per step, None is the engine's, 0 does not speculate; never changes a token.
        json_object: the output must be a JSON object. Of this and the next three, at most one.
        json_schema: the output must be JSON that satisfies this schema: a dict, or JSON text (kept as text).
        regex: the whole output must match this regular expression (Rust's syntax, anchored at both ends).
        grammar: the output must be a sentence of this grammar, in llguidance's Lark form.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    draft_len: int | None = None
    json_object: bool = False
    json_schema: Mapping[str, object] | str | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        checked: dict[str, object] = {}
        for name, (is_right, right) in _REAL_RULES.items():
            checked[name] = _real(name, getattr(self, name), right)
            if not is_right(checked[name]):
                raise _refusal(name, getattr(self, name), f"a number {right}")
        for name in _INT_RULES:
            checked[name] = _integer(name, getattr(self, name))
        for name in _BOOLS:
            if not isinstance(getattr(self, name), bool):
                raise _refusal(name, getattr(self, name), "True or False")
        checked["logit_bias"] = _logit_bias(self.logit_bias)
        allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
        checked["allowed_token_ids"] = None if allowed is None else tuple(dict.fromkeys(allowed))
        checked["stop_token_ids"] = _token_ids("stop_token_ids", self.stop_token_ids)
        checked["bad_words"] = _strings("bad_words", self.bad_words)
        checked["stop"] = _stops(self.stop)
        checked["json_schema"] = _json_schema(self.json_schema)
        checked["regex"], checked["grammar"] = _text("regex", self.regex), _text("grammar", self.grammar)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        self._check_together()

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refusal("min_tokens", self.min_tokens, f"<= max_tokens ({self.max_tokens})")
        if self.allowed_token_ids == ():
            raise _refusal("allowed_token_ids", [], "None (every token) or hold at least one id")
        if self.stop and not self.detokenize:
            raise _refusal("stop", self.stop, "None while detokenize=False: stop strings are found in text")
        constraints = [name for name in GRAMMAR_OPTIONS if getattr(self, name)]
        if len(constraints) > 1:
            raise _refusal(constraints[1], getattr(self, constraints[1]), f"left out beside {constraints[0]}")
        if constraints and self.ignore_eos:
            raise _refusal("ignore_eos", True, f"False with {constraints[0]}: EOS is how its output ends")

    @property
    def has_grammar(self) -> bool:
        """Whether json_object, json_schema, regex or grammar constrains the output."""
        return any(getattr(self, name) for name in GRAMMAR_OPTIONS)

    @classmethod
    def from_dict(cls, options: Mapping[str, object]) -> SamplingParams:
        """Build from a mapping of option names to values.

        Raises:
            RequestError: an option is unknown (the nearest right name is suggested) or its value is refused.
        """
        if not isinstance(options, Mapping):
            raise RequestError(f"SamplingParams options must be a dict, not {reprlib.repr(options)}")
        return cls(**{str(name): value for name, value in options.items()})

    @property
    def is_greedy(self) -> bool:
        """Whether the highest logit is taken; only temperature 0 says so, never an unset or tiny one."""
        return self.temperature == 0

    @cached_property
    def has_penalties(self) -> bool:
        """Whether what was prompted or generated changes the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @cached_property
    def is_plain(self) -> bool:
        """Whether the raw logits' highest is the answer, as far as what cannot change says: a bias is a dict."""
        return self.is_greedy and not (self.allowed_token_ids or self.has_penalties)

    @cached_property
    def allowed_array(self) -> np.ndarray:
        """allowed_token_ids as int64: made once, since a list may be as long as the vocabulary."""
        return np.array(self.allowed_token_ids or (), dtype=np.int64)

    def validate_for_vocab(self, vocab_size: int) -> None:
        """Refuse what no vocabulary of `vocab_size` tokens can honour; a larger top_k is clamped instead.

        Raises:
            RequestError: a token id is outside 0..vocab_size - 1, or more logprobs are wanted than tokens exist.
        """
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            outside = [token_id for token_id in getattr(self, name) or () if token_id >= vocab_size]
            if outside:
                right = f"made of token ids below the vocabulary size {vocab_size}"
                raise _refusal(name, outside, right)
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocab_size:
                raise _refusal(name, getattr(self, name), f"at most the vocabulary size {vocab_size}")
