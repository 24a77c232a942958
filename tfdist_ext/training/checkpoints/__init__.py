"""Files that a training writes and reads: checkpoints, models.

Contains the folder of checkpoints, the file format, saving and resuming, and the evaluator. No
other room knows file formats.
"""
