"""Figures of the controller that the simulator must share: it imports no LMCache, and neither does this."""

SETTLE_SECONDS = 0.5
"""A snapshot that was overtaken waits this long before it moves to disk: the connector may just be dropping it."""
DISK_HEADROOM = 0.05
"""Share of the disk tier kept free for writes that are on their way."""
CRITICAL = 0.97
"""CPU usage above which more goes than is being written out: waiting for the disk would drop new stores."""
IN_FLIGHT_SHARE = 8
"""At most this fraction (one over it) of CPU memory is being written at a time: what waits for the disk frees nothing."""
PAUSE_SECONDS = 1.0
"""No moves for this long after the disk refused one; victims are deleted meanwhile."""
