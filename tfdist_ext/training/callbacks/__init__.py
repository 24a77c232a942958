"""The state of callbacks in a checkpoint, and WorkerTensorBoard.

`loop` calls the callbacks, and `distribution` chooses which of them run on this task.
"""
