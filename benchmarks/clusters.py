"""Runs a program as all tasks of a cluster on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tfdist_ext.launcher.plan import local_plan
from tfdist_ext.launcher.run import Limits, run_plan

__all__ = ["output_of_chief", "outputs_in_namespaces", "outputs_of_tasks"]


def output_of_chief(command: list[str], *, workers: int, ps: int) -> tuple[int, str]:
    """(exit status of the run, what its chief printed)."""
    status, outputs = outputs_of_tasks(command, workers=workers, ps=ps)
    return status, outputs["chief-0"]


def outputs_of_tasks(
    command: list[str], *, workers: int, ps: int = 0, **variables: str
) -> tuple[int, dict[str, str]]:
    """(exit status of the run, what each task printed, by names as "worker-0").

    Args:
        variables: of the environment, beside those of this process.
    """
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **variables}
    env.pop("TF_CONFIG", None)
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as nowhere,
        local_plan(command, workers=workers, ps=ps, log_dir=folder, env=env) as plan,
    ):
        limits = Limits(grace=1, linger=0, timeout=1800)
        result = run_plan(plan, limits, env=env, stream=nowhere)
        logs = {path.stem: path.read_text() for path in Path(folder).glob("*.log")}
        return result.exit_status, logs


def outputs_in_namespaces(
    command: list[str], *, workers: int, rate: str = "", latency: str = ""
) -> tuple[int, dict[str, str]]:
    """As `outputs_of_tasks`, each worker in a network namespace of its own. Needs root.

    Args:
        rate: what a worker may send, as "1gbit"; no limit by default.
        latency: of a message, as "1ms". Linux needs the kernel module sch_netem for it.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "environments"))
    from namespaces import hosts

    processes = []
    with hosts(workers) as machines:
        for number in range(workers):
            for words in limits(rate, latency):
                subprocess.run(machines.command(number, "tc", *words), check=True)
        cluster = {"worker": [f"{address}:2222" for address in machines.addresses]}
        for number in range(workers):
            task = {"cluster": cluster, "task": {"type": "worker", "index": number}}
            env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "TF_CONFIG": json.dumps(task)}
            words = ["timeout", "-s", "KILL", "1800", *command]
            process = subprocess.Popen(
                machines.command(number, *words),
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            processes.append(process)
        outputs = [process.communicate()[0] for process in processes]
    status = max(abs(process.returncode) for process in processes)
    return status, {f"worker-{number}": text for number, text in enumerate(outputs)}


def limits(rate: str, latency: str) -> list[list[str]]:
    """The commands of `tc` that limit a link."""
    found = []
    parent = ["root", "handle", "1:"]
    if rate:
        bits = (
            float(re.split("[a-z]", rate)[0]) * {"m": 1e6, "g": 1e9}[rate.strip("0123456789.")[0]]
        )
        burst = str(max(64_000, int(bits / 8 / 250)))  # Linux looks 250 times a second
        found.append(["qdisc", "add", "dev", "eth0", *parent, "tbf", "rate", rate, "burst", burst])
        found[-1] += ["latency", "400ms"]
        parent = ["parent", "1:1", "handle", "10:"]
    if latency:
        found.append(["qdisc", "add", "dev", "eth0", *parent, "netem", "delay", latency])
    return found
