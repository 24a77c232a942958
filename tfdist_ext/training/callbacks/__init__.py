"""Keras's callbacks, and our own, in a training of several tasks.

Here belong which of them run on which task, what their `self.model` does, and WorkerTensorBoard.
The loop calls them; nothing here knows how steps run.
"""
