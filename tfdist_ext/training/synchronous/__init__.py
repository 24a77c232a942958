"""Strategies whose replicas run each step together: mirrored, several workers, placed, custom.

Here belong their engine, their compiled steps, and how values of replicas become one value.
Parameter servers are next door and not known here; what both do alike is in `programs.py`.
"""
