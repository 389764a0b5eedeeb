"""Cache policies: where snapshots are taken, what lies below the GPU and in which order it goes. One family a file."""
