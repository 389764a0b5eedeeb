"""Request traces: one model of them, readers of the formats they come in, and a generator. No engine, no clock."""
