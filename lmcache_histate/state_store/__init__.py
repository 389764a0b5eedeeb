"""What exists: the prefix tree, its units of eviction and their residence times. Pure: no engine, threads or clock."""
