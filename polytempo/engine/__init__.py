"""Rows, scheduling, sampling and the decode step."""
