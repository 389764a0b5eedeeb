"""Agent workloads, traces and reports."""
