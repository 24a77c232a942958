"""The state of a model as a whole: values of its variables, their names, the chief's for all.

Here belongs what saving, comparing and sharing of state have in common. Nothing here writes files.
"""
