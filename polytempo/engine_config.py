"""An engine's options: frozen, validated, torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from polytempo.errors import ConfigError, unknown_option


class AdvanceMode(str, Enum):
    """How far rows advance in a step.

    PER_SEQUENCE: each row by its own accepted + 1. COHORT: all rows by the batch's minimum, the baseline of engines
    whose caches end at one shared column.
    """

    PER_SEQUENCE = "per_sequence"
    COHORT = "cohort"


AUTO = "auto"
NATIVE, TRITON, TORCH = "native", "triton", "torch"
KERNELS = (AUTO, NATIVE, TRITON, TORCH)
WEIGHTS = ("auto", "expanded", "packed")
"""How a model's quantised weights lie in memory, see `load_model`; "auto" asks which kernels will run."""
AUTO_MAX_DRAFTS = 5
SPECULATE = (AUTO, "mtp", "none")
KV_LAYOUTS = ("ring", "left_aligned")


@dataclass(frozen=True)
class EngineConfig:
    """How much an engine may hold and do at once.

    Attributes:
        max_rows: sequences that run at the same time; each owns one slot of per-row state.
        max_model_len: most positions of one sequence, prompt and output together, in tokens.
        max_chunk: most prompt tokens that one row brings into one forward.
        max_step_tokens: most tokens of all rows in one forward; bounds activation memory.
        speculate: "mtp" drafts with the checkpoint's MTP block and refuses a checkpoint without one, "none" does not
            draft, "auto" drafts if it can.
        draft_len: drafts per row and step, 0 or more, or "auto": what measured acceptance and step cost say pays,
            up to AUTO_MAX_DRAFTS. A request's own draft_len comes first.
        kv_advance: "per_sequence" or "cohort", see AdvanceMode.
        kernels: "native" runs the forward in C++ kernels on the CPU, "triton" in Triton kernels on a GPU; both refuse
            where that cannot be. "torch" uses neither, "auto" leaves it to the model, which uses what it can.
        memory: most bytes for the state of all rows, None for no bound but max_model_len. Rows of fewer tokens leave
            more to others; when it runs out, the youngest row is set back and computed again later.
        prefix_cache: most bytes for snapshots of rows' state, from which later rows with the same first tokens start; 0
            keeps none. Never changes a token.
        kv_layout: "ring", or "left_aligned": raw keys of all rows end at one shared column, so that the order in which
            a row's keys are reduced depends on its neighbours. A baseline; see `polytempo.cache.window`.
        mixed_prompt_tokens: most prompt tokens, of all rows together, in a step in which a row decodes: bounds how long
            a long prompt can hold up its neighbours' next token. None is up to max_step_tokens. Never changes a token.
        queue_limit: most rows that may wait when no seat is free; more are refused. None is no limit.
    """

    max_rows: int = 32
    max_model_len: int = 4096
    max_chunk: int = 256
    max_step_tokens: int = 1024
    speculate: str = "auto"
    draft_len: int | str = AUTO
    kv_advance: str = AdvanceMode.PER_SEQUENCE.value
    kernels: str = AUTO
    kv_layout: str = KV_LAYOUTS[0]
    memory: int | None = None
    prefix_cache: int = 0
    mixed_prompt_tokens: int | None = None
    queue_limit: int | None = None

    def __post_init__(self) -> None:
        if self.draft_len != AUTO and not isinstance(self.draft_len, int):
            raise ConfigError(f"engine option 'draft_len' is {self.draft_len!r}; it must be {AUTO!r} or an integer")
        counts = ["max_rows", "max_model_len", "max_chunk", "max_step_tokens"]
        counts += ["draft_len"] * (self.draft_len != AUTO) + ["memory"] * (self.memory is not None)
        for name in counts:
            value, least = getattr(self, name), 0 if name == "draft_len" else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"engine option {name!r} is {value!r}; it must be an integer of at least {least}")
        if not isinstance(self.prefix_cache, int) or isinstance(self.prefix_cache, bool) or self.prefix_cache < 0:
            raise ConfigError(
                f"engine option 'prefix_cache' is {self.prefix_cache!r}; it must be a number of bytes, or 0"
            )
        if self.prefix_cache and self.kv_layout != "ring":
            raise ConfigError(f"engine option 'prefix_cache' needs kv_layout 'ring', not {self.kv_layout!r}")
        for name, least in (("mixed_prompt_tokens", 1), ("queue_limit", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ConfigError(
                    f"engine option {name!r} is {value!r}; it must be an integer of at least {least}, or None"
                )
        if self.max_step_tokens < self.max_rows:
            raise ConfigError(
                f"engine option 'max_step_tokens' is {self.max_step_tokens}, less than max_rows "
                f"({self.max_rows}); every running row needs at least one token per step"
            )
        modes = [mode.value for mode in AdvanceMode]
        choices = {"speculate": SPECULATE, "kv_advance": modes, "kv_layout": KV_LAYOUTS, "kernels": KERNELS}
        for name, known in choices.items():
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(f"engine option {name!r}: " + unknown_option("value", str(value), known))
        if self.draft_len != AUTO and self.draft_len >= self.max_chunk:
            raise ConfigError(
                f"engine option 'draft_len' is {self.draft_len}; a verify feeds draft_len + 1 tokens, which may not "
                f"exceed max_chunk ({self.max_chunk})"
            )

    @property
    def most_drafts(self) -> int:
        """Most drafts of a request that names no draft length of its own."""
        return AUTO_MAX_DRAFTS if self.draft_len == AUTO else self.draft_len

    @property
    def advance_mode(self) -> AdvanceMode:
        """`kv_advance` as an enum."""
        return AdvanceMode(self.kv_advance)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Build from keyword options; None means the default.

        Args:
            options: values by field name.

        Returns:
            The validated config.

        Raises:
            ConfigError: an option is unknown (the nearest known one is suggested) or out of range.
        """
        known = {field.name for field in fields(cls)}
        for name in options:
            if name not in known:
                raise ConfigError(unknown_option("engine option", name, known))
        return cls(**{name: value for name, value in options.items() if value is not None})
