"""Ranks, groups, memory that peers can store into, and the watchdog over waits (design: floor 1)."""
