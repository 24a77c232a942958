"""Functions in processes of their own: the tasks of a cluster on this machine.

Here belongs what starts, watches and ends such processes, and what they run first. It does not use
pytest, and imports TensorFlow only in the processes.
"""

from tfdist_ext.errors import TaskError
from tfdist_ext.testing.tasks.runner import check_timeout, run_tasks, supervise, task_counts
from tfdist_ext.testing.tasks.supervision import Results

__all__ = ["Results", "TaskError", "check_timeout", "run_tasks", "supervise", "task_counts"]
