"""What must be equal on all workers, and barriers between workers that are alive.

A single task passes all of it.
"""
