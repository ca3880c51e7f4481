"""What every forward of an engine needs: weights, rotary tables, every row's state, the limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from polytempo.cache.store import RowStore
from polytempo.engine.prefix import PrefixCache
from polytempo.engine.sampling import TORCH, SamplingOps
from polytempo.engine_config import EngineConfig
from polytempo.model.deepseek_v4 import DeepseekV4
from polytempo.model.rope import RopeTables


@dataclass(frozen=True)
class Target:
    """The full model whose output we promise, on the state that its rows share.

    Attributes:
        prefix_cache: snapshots for later rows with the same first tokens, None if none are kept.
        per_row_positions: every row of a forward has its own position, length and draft count.
    """

    per_row_positions: ClassVar[bool] = True
    model: DeepseekV4
    tables: RopeTables
    store: RowStore
    config: EngineConfig
    prefix_cache: PrefixCache | None = None

    @property
    def sampling_ops(self) -> SamplingOps:
        """In C++ where the model is."""
        native = self.model.native
        return TORCH if native is None else SamplingOps(native.greedy, native.uniform)
