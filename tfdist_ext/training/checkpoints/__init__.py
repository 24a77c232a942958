"""What a training writes and reads back: checkpoints, models, exports.

Here belong the folder of checkpoints and its files, resuming, and what the chief does for all.
The only room that knows file formats.
"""
