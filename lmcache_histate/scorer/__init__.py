"""What to do: where to save snapshots and what to evict first. Pure: no engine, no threads, no clock."""
