"""Each environment: what is read from it, when it is passed over, and when it is refused."""

from __future__ import annotations

import json

import pytest

from tfdist_ext.cluster import ClusterConfig, Task, describe_environments
from tfdist_ext.cluster.config import ENVIRONMENTS
from tfdist_ext.errors import ClusterConfigError

Env = dict[str, str]
TF_CONFIG = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'


def srun(nodes: dict[str, list[int]], nodelist: str, tasks_per_node: str, **more: str) -> list[Env]:
    """The variables srun sets for each rank, given the ranks that Slurm put on each node."""
    envs: dict[int, Env] = {}
    for node_id, (name, ranks) in enumerate(nodes.items()):
        for local_id, rank in enumerate(ranks):
            envs[rank] = {
                "SLURM_JOB_ID": "17",
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NODELIST": nodelist,
                "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
                "SLURM_PROCID": str(rank),
                "SLURM_NODEID": str(node_id),
                "SLURM_LOCALID": str(local_id),
                "SLURM_GTIDS": ",".join(map(str, ranks)),
                "SLURMD_NODENAME": name,
                **more,
            }
    return [envs[rank] for rank in sorted(envs)]


def mpirun(local_sizes: list[int], **more: str) -> list[Env]:
    """The variables mpirun sets for each rank, filling host after host."""
    return [
        {
            "OMPI_COMM_WORLD_RANK": str(sum(local_sizes[:host]) + local),
            "OMPI_COMM_WORLD_SIZE": str(sum(local_sizes)),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(count),
            **more,
        }
        for host, count in enumerate(local_sizes)
        for local in range(count)
    ]


def job_pods(size: int, **more: str) -> list[Env]:
    """The variables of each pod of an indexed Job called train."""
    return [
        {
            "JOB_COMPLETION_INDEX": str(index),
            "HOSTNAME": f"train-{index}",
            "TFDIST_JOB_SIZE": str(size),
            "TFDIST_JOB_SERVICE": "peers",
            **more,
        }
        for index in range(size)
    ]


def jobset_pods(tasks: str, **more: str) -> list[Env]:
    """The variables of each pod of a JobSet called train."""
    sizes = {job: int(size) for job, size in (each.split("=") for each in tasks.split(","))}
    return [
        {
            "JOB_COMPLETION_INDEX": str(index),
            "HOSTNAME": f"train-{job}-0-{index}",
            "TFDIST_TASKS": tasks,
            **more,
        }
        for job, size in sizes.items()
        for index in range(size)
    ]


def training_job(hosts: list[str]) -> list[Env]:
    return [{"SM_HOSTS": json.dumps(hosts), "SM_CURRENT_HOST": host} for host in hosts]


CLUSTERS = (
    # (why, what every task sees, the hosts of the workers in rank order)
    (
        "slurm: node2 comes before node10",
        srun({"node2": [0], "node10": [1]}, "node[2,10]", "1(x2)"),
        ["node2", "node10"],
    ),
    (
        "slurm: block distribution, uneven",
        srun({"n1": [0, 1], "n2": [2, 3], "n3": [4]}, "n[1-3]", "2(x2),1"),
        ["n1", "n1", "n2", "n2", "n3"],
    ),
    ("mpi: one machine", mpirun([3]), ["localhost"] * 3),
    ("mpi: hosts that are told", mpirun([2, 1], TFDIST_HOSTS="n1:2,n2"), ["n1", "n1", "n2"]),
    ("sagemaker: in the order given", training_job(["algo-1", "algo-10", "algo-2"]), None),
    ("kubernetes", job_pods(3), ["train-0.peers", "train-1.peers", "train-2.peers"]),
    (
        "kubernetes: hostNetwork hides the pod's name",
        job_pods(2, HOSTNAME="machine7", TFDIST_JOB_NAME="train"),
        ["train-0.peers", "train-1.peers"],
    ),
)


@pytest.mark.parametrize(("envs", "hosts"), [row[1:] for row in CLUSTERS], ids=[
    row[0].replace(" ", "-") for row in CLUSTERS
])  # fmt: skip
def test_every_task_sees_one_cluster_and_itself_in_it(
    envs: list[Env], hosts: list[str] | None
) -> None:
    hosts = hosts or ["algo-1", "algo-10", "algo-2"]
    assert len(envs) == len(hosts) >= 2
    views = [ClusterConfig.from_env(env) for env in envs]
    for rank, (view, env) in enumerate(zip(views, envs, strict=True)):
        assert view is not None
        assert view.task == Task("worker", rank)
        assert view.jobs == views[0].jobs  # type: ignore[union-attr]
        assert view.address.rpartition(":")[0] == env.get("SLURMD_NODENAME", hosts[rank])
        assert view.is_chief == (rank == 0)
    assert [a.rpartition(":")[0] for a in views[0].jobs["worker"]] == hosts  # type: ignore[union-attr]


def test_slurm_jobs_and_steps_get_different_ports() -> None:
    env = srun({"a": [0], "b": [1]}, "a,b", "1(x2)")[0]

    def port(job: int, step: int) -> int:
        ids = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
        config = ClusterConfig.from_env(env | ids)
        assert config is not None
        return int(config.address.rpartition(":")[2])

    neighbors = [port(job, step) for job in range(100, 120) for step in range(3)]
    assert len(set(neighbors)) == len(neighbors)
    assert all(20000 <= number < 30000 for number in neighbors)
    assert port(17, 0) == port(17, 0)


def test_port_base_sets_the_ports() -> None:
    env = training_job(["algo-1", "algo-2"])[0]
    for more, port in (({}, 22222), ({"TFDIST_PORT_BASE": "65535"}, 65535)):
        config = ClusterConfig.from_env(env | more)
        assert config is not None
        assert config.address.endswith(f":{port}")


@pytest.mark.parametrize(
    ("tasks", "more", "service"),
    [
        ("chief=1,worker=2,ps=1,evaluator=1", {}, "train"),
        ("worker=2,evaluator=1", {"TFDIST_JOB_SERVICE": "net"}, "net"),
        ("worker=1,evaluator=1", {}, "train"),  # a cluster of one, as with tfdist run
    ],
)
def test_pods_of_a_jobset_see_one_cluster(tasks: str, more: Env, service: str) -> None:
    """Recorded: HOSTNAME and JOB_COMPLETION_INDEX are all that a pod of a JobSet has of its own."""
    seen: dict[str, ClusterConfig] = {}
    for env in jobset_pods(tasks, **more):
        config = ClusterConfig.from_env(env)
        assert config is not None
        assert config.address == f"{env['HOSTNAME']}.{service}:22222"
        assert f"-{config.task.type}-0-{config.task.index}" in env["HOSTNAME"]
        seen[str(config.task)] = config
    evaluator = seen.pop("evaluator:0")
    (jobs,) = {config.jobs for config in seen.values()}
    assert sum(map(len, jobs.values())) == len(seen)
    of_evaluator = f"train-evaluator-0-0.{service}:22222"
    assert dict(evaluator.jobs) == {**jobs, "evaluator": (of_evaluator,)}


def test_ranks_agree_on_ports_in_any_order_of_roles() -> None:
    for tasks in ("evaluator=1,chief=1,worker=2", "chief=1,evaluator=1,worker=2"):
        env = {"TFDIST_TASKS": tasks}
        ranks = srun({"a": [0, 1, 2, 3]}, "a", "4")
        configs = [ClusterConfig.from_env(rank | env) for rank in ranks]
        found = {config.task.type: dict(config.jobs) for config in configs if config is not None}
        evaluator = found["evaluator"].pop("evaluator")
        assert found["evaluator"] == found["chief"] == found["worker"]
        addresses = [address for of_job in found["chief"].values() for address in of_job]
        assert len({*addresses, *evaluator}) == 4


def test_ranks_of_srun_get_the_roles_of_tfdist_tasks() -> None:
    tasks = "chief=1,worker=2,ps=1,evaluator=1"
    ranks = srun({"a": [0, 1, 2], "b": [3, 4]}, "a,b", "3,2")
    configs = [ClusterConfig.from_env(env | {"TFDIST_TASKS": tasks}) for env in ranks]
    names = [str(config.task) for config in configs if config is not None]
    assert names == ["chief:0", "worker:0", "worker:1", "ps:0", "evaluator:0"]
    *trains, evaluator = [dict(config.jobs) for config in configs if config is not None]
    first = int(trains[0]["chief"][0].partition(":")[2])
    workers = (f"a:{first + 1}", f"a:{first + 2}")
    assert trains == [{"chief": (f"a:{first}",), "worker": workers, "ps": (f"b:{first}",)}] * 4
    assert evaluator["evaluator"] == (f"b:{first + 1}",)


PASSED_OVER: tuple[tuple[str, Env, str], ...] = (
    # (environment, variables, reason)
    ("TF_CONFIG", {"TF_CONFIG": " "}, "TF_CONFIG is empty"),
    ("Slurm", {"SLURM_JOB_ID": "17"}, "SLURM_PROCID is not set"),
    (
        "Slurm",
        {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NODELIST": "n[1-2]"},
        "SLURM_STEP_NODELIST is not set: not inside an srun step",
    ),
    ("Slurm", srun({"n1": [0]}, "n1", "1")[0], "1 task: no cluster needed"),
    ("Open MPI", mpirun([1])[0], "1 task: no cluster needed"),
    ("SageMaker", training_job(["algo-1"])[0], "1 task: no cluster needed"),
    ("Kubernetes", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "JOB_COMPLETION_INDEX is not set"),
    ("Kubernetes", job_pods(1)[0], "1 task: no cluster needed"),
)


@pytest.mark.parametrize(("name", "env", "reason"), PASSED_OVER)
def test_incomplete_environment_is_passed_over_with_a_reason(
    name: str, env: Env, reason: str
) -> None:
    assert ClusterConfig.from_env(env) is None
    assert dict(describe_environments(env))[name] == reason


_SRUN = srun({"a": [0, 1], "b": [2]}, "a,b", "2,1")[1]
_CYCLIC = srun({"a": [0, 2], "b": [1, 3]}, "a,b", "2(x2)")
_PODS = job_pods(2)[1]
_JOBSET = jobset_pods("chief=1,worker=2,ps=1")[2]
_MPI = mpirun([2, 1])[1]
_SM = training_job(["algo-1", "algo-2"])[1]
REFUSED: tuple[tuple[str, Env, dict[str, str | None], str], ...] = (
    # (why, variables, changes: None takes one out, fragment of the message)
    ("no counts", _SRUN, {"SLURM_STEP_TASKS_PER_NODE": None}, "TASKS_PER_NODE is not set"),
    ("fewer hosts", _SRUN, {"SLURM_STEP_NODELIST": "a"}, "one host for each count"),
    ("another node", _SRUN, {"SLURM_NODEID": "1"}, "SLURM_NODEID must be '0'"),
    ("cyclic, rank 0", _CYCLIC[0], {}, "SLURM_GTIDS must be '0,1'"),
    ("cyclic, rank 1", _CYCLIC[1], {}, "srun --distribution=block"),
    ("bad port base", _SRUN, {"TFDIST_PORT_BASE": "http"}, "TFDIST_PORT_BASE must be a whole"),
    ("other tasks", _SRUN, {"TFDIST_TASKS": "chief=1,worker=1"}, "must add up to"),
    ("no room for ports", _SRUN, {"TFDIST_PORT_BASE": "65535"}, "a whole number from 1 to 65534"),
    ("a host no one can dial", _SRUN, {"SLURM_STEP_NODELIST": "a/b,b", "SLURMD_NODENAME": None},
     "cluster.worker[0] has a host name"),
    ("hosts unknown", _MPI, {}, "TFDIST_HOSTS is not set, and not all 3 ranks run on this machine"),
    ("size 0", _MPI, {"OMPI_COMM_WORLD_SIZE": "0"}, "must be a whole number from 1"),
    ("ports for slots", _MPI, {"TFDIST_HOSTS": "n1:2222,n2:2222"}, "has 4444 slots"),
    ("laid out by node", _MPI, {"TFDIST_HOSTS": "n1,n2,n1"}, "LOCAL_RANK must be 0"),
    ("no job size", _PODS, {"TFDIST_JOB_SIZE": None}, "TFDIST_JOB_SIZE is not set"),
    ("another host name", _PODS, {"HOSTNAME": "machine7"}, "Set TFDIST_JOB_NAME"),
    ("index past the end", _PODS, {"TFDIST_JOB_SIZE": "1"}, "below TFDIST_JOB_SIZE, 1"),
    ("a role twice", _JOBSET, {"TFDIST_TASKS": "worker=2,worker=2"}, "of chief, worker, ps"),
    ("a role it has not", _JOBSET, {"TFDIST_TASKS": "chief=1"}, "Name each replicatedJob"),
    ("too few of its role", _JOBSET, {"TFDIST_TASKS": "worker=1"}, "the number of worker"),
    ("a second replica", _JOBSET, {"HOSTNAME": "train-worker-1-1"}, "with replicas: 1"),
    ("no jobset", _JOBSET, {"HOSTNAME": "worker-0-1"}, "must be <jobset>-<job>-0-1, for a job"),
    ("not JSON", _SM, {"SM_HOSTS": "algo-1,algo-2"}, "SM_HOSTS: is not JSON at line 1"),
    ("a host twice", _SM, {"SM_HOSTS": '["algo-2", "algo-2"]'}, "must not repeat a host"),
    ("a stranger", _SM, {"SM_CURRENT_HOST": "algo-3"}, "SM_CURRENT_HOST must be one of SM_HOSTS"),
    ("bad TF_CONFIG", _SRUN, {"TF_CONFIG": "{}"}, "TF_CONFIG: cluster is missing"),
)  # fmt: skip


@pytest.mark.parametrize(("env", "changes", "fragment"), [row[1:] for row in REFUSED], ids=[
    row[0].replace(" ", "-") for row in REFUSED
])  # fmt: skip
def test_contradictory_environment_is_refused(
    env: Env, changes: dict[str, str | None], fragment: str
) -> None:
    merged = {**env, **changes}
    env = {name: value for name, value in merged.items() if value is not None}
    with pytest.raises(ClusterConfigError) as caught:
        ClusterConfig.from_env(env)
    message = str(caught.value)
    assert fragment in message
    assert ", got " in message
    assert len(message) < 450
    # The description of the same variables says so too, and raises nothing.
    assert f"cannot be used: {message}" in dict(describe_environments(env)).values()


ORDER = ["TF_CONFIG", "Open MPI", "Slurm", "SageMaker", "Kubernetes"]


def test_environments_have_an_order_of_precedence() -> None:
    # Everything at once: what is taken away uncovers the next.
    layers: dict[str, Env] = {
        "TF_CONFIG": {"TF_CONFIG": TF_CONFIG},
        "Open MPI": mpirun([2])[1],
        "Slurm": srun({"a": [0], "b": [1]}, "a,b", "1(x2)")[1],
        "SageMaker": training_job(["algo-1", "algo-2"])[1],
        "Kubernetes": job_pods(2)[1],
    }
    assert list(layers) == ORDER == list(ENVIRONMENTS)
    left = dict(layers)
    for name in ORDER:
        env = {k: v for layer in left.values() for k, v in layer.items()}
        config = ClusterConfig.from_env(env)
        assert config is not None
        assert config.source.startswith(name)
        assert config.task == Task("worker", 1)
        del left[name]
    assert [name for name, _ in describe_environments({})] == ORDER
