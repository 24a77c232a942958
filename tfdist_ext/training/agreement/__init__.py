"""What must be equal on all workers, and barriers between workers that are alive.

With a single task, checks and barriers do nothing.
"""
