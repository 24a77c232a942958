"""The cluster that the environment describes, and this task. Needs no TensorFlow.

    from tfdist_ext.cluster import ClusterConfig

    cluster = ClusterConfig.from_env()        # TF_CONFIG, mpirun, srun, SageMaker, Kubernetes
    if cluster is not None:                   # None: this process is alone
        print(cluster.task, "of", cluster.num_tasks, "from", cluster.source)
        print(cluster.is_chief, cluster.address)

The other way, to start the tasks of a cluster:

    jobs = {"worker": ("localhost:2222", "localhost:2223")}
    cluster = ClusterConfig(jobs, Task("worker", 0))
    for task in cluster.tasks():
        env = {"TF_CONFIG": cluster.for_task(task.type, task.index).to_tf_config()}

An invalid cluster raises ClusterConfigError, which names the key and the value.
"""

from __future__ import annotations

from tfdist_ext.cluster.config import ClusterConfig, describe_environments
from tfdist_ext.cluster.jobs import Task

__all__ = ["ClusterConfig", "Task", "describe_environments"]
