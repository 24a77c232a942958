"""Strategies whose replicas run each step together: mirrored, several workers, placed, custom.

Here belong their engine, their compiled steps, and how values of replicas become one value.
Parameter servers have a room of their own. `loop.py` and `model.py` know both rooms.
"""
