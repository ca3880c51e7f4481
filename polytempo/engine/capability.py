"""Whether rows may advance by different counts: only if everything that holds their state carries per-row positions."""

from __future__ import annotations

import warnings

from polytempo.engine_config import AdvanceMode


def first_missing(parts: dict[str, object]) -> str | None:
    """Name of the first part that does not declare `per_row_positions = True`; None if all do.

    Args:
        parts: name -> object, in the order in which a step meets them.

    Returns:
        The name, with the object's type.
    """
    for name, part in parts.items():
        # Anything but a plain True is a part that was never checked.
        if getattr(part, "per_row_positions", None) is not True:
            return f"the {name} ({getattr(part, '__name__', type(part).__name__)})"
    return None


def granted_advance_mode(requested: AdvanceMode, parts: dict[str, object]) -> AdvanceMode:
    """The advance mode that these parts can carry.

    Args:
        requested: the engine option `kv_advance`.
        parts: cache layouts, masks, step and draft chain, by name.

    Returns:
        `requested`, or COHORT, after a warning that names the first part which lacks per-row positions.
    """
    missing = first_missing(parts) if requested is AdvanceMode.PER_SEQUENCE else None
    if missing is None:
        return requested
    warnings.warn(
        f"kv_advance 'per_sequence' is refused: {missing} does not carry per-row positions (attribute "
        "'per_row_positions'); rows advance by 'cohort'",
        stacklevel=3,
    )
    return AdvanceMode.COHORT
