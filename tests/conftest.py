"""For all tests."""

from __future__ import annotations

import signal

# A shell that starts the tests in the background has SIGINT ignored, which every process started from here would inherit;
# tests that interrupt one would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
