"""The state of a model: values of its variables, their names, and how the chief sends them.

Saving, comparing and sharing of state use this room. Nothing here writes files.
"""
