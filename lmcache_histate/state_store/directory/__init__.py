"""The cross-instance directory: which instance holds which chunk in which tier. Pure: no thread and no clock."""
