"""Times as traces write them."""

from __future__ import annotations

from datetime import UTC, datetime


def seconds(time: float | str) -> float:
    """Seconds since an epoch: a number as it is, or an ISO 8601 text (without a zone: UTC).

    Raises:
        ValueError: A text of another form.
    """
    if isinstance(time, int | float):
        return float(time)
    moment = datetime.fromisoformat(time)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
