"""What every forward of an engine needs: weights, rotary tables, every row's state, the limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from polytempo.cache.store import RowStore
from polytempo.config import EngineConfig
from polytempo.model.deepseek_v4 import DeepseekV4
from polytempo.model.rope import RopeTables


@dataclass(frozen=True)
class Target:
    """The full model whose output we promise, on the state that its rows share.

    Attributes:
        per_row_positions: every row of a forward has its own position, length and draft count.
    """

    per_row_positions: ClassVar[bool] = True
    model: DeepseekV4
    tables: RopeTables
    store: RowStore
    config: EngineConfig
