"""What must be equal on all workers, and whether they are alive.

Here belong comparisons of calls, data and models, the other tasks' state, and SIGTERM.
A single task passes none of it.
"""
