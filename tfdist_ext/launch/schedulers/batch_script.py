"""The batch script of a job for Slurm: saves before its time is over, and goes on by itself."""

from __future__ import annotations

import shlex
from typing import Any

from tfdist_ext.launch.command_line import STARTS_AGAIN
from tfdist_ext.launch.exit_codes import PREEMPTED, RESTART
from tfdist_ext.launch.schedulers.job_file import Job, check_table

__all__ = ["batch_script"]

_KEYS: dict[str, tuple[type, int]] = {
    "time": (str, 0),
    "partition": (str, 0),
    "account": (str, 0),
    "qos": (str, 0),
    "constraint": (str, 0),
    "memory": (str, 0),
    "cpus_per_node": (int, 1),
    "output": (str, 0),
    "max_requeues": (int, 0),
    "options": (list, 0),
    "setup": (list, 0),
}
_NAMES = {"memory": "mem", "cpus_per_node": "cpus-per-task"}  # a task of sbatch is a node here
_USUAL: dict[str, Any] = {"output": "%x-%j.out", "max_requeues": 20, "options": [], "setup": []}


def batch_script(job: Job, where: str = "job.toml") -> str:
    """The text of a script for sbatch.

    Raises:
        LaunchError: a key of [slurm] that cannot be right.
    """
    table = check_table(f"{where}: slurm", job.scheduler.get("slurm", {}), _KEYS)
    values = {**_USUAL, **table}
    directives = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "output": values["output"],
        # The first run's output stays when the job is queued again.
        "open-mode": "append",
        # To the tasks, so long before the end of its time: they save, and end.
        "signal": f"USR1@{job.grace}",
        "requeue": None,
    }
    if job.gpus_per_node:
        directives["gpus-per-node"] = job.gpus_per_node
    for key in ("time", "partition", "account", "qos", "constraint", "memory", "cpus_per_node"):
        if key in values:
            directives[_NAMES.get(key, key)] = values[key]
    lines = [f"#SBATCH --{name}{'' if v is None else f'={v}'}" for name, v in directives.items()]
    lines += [f"#SBATCH {option}" for option in values["options"]]
    env = {STARTS_AGAIN: "1", **job.env}
    exports = [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    return _SCRIPT.format(
        directives="\n".join(lines),
        setup="\n".join(["", *values["setup"], *exports]),
        run=_run_line(job),
        max_requeues=values["max_requeues"],
        again=f"{PREEMPTED} or {RESTART}",
        preempted=PREEMPTED,
        restart=RESTART,
    )


def _run_line(job: Job) -> str:
    words = ["--workers-per-node", str(job.workers_per_node)]
    if job.chief is not None:
        words.append("--chief" if job.chief else "--no-chief")
    if job.ps:
        words += ["--ps", str(job.ps)]
    if job.evaluator:
        words.append("--evaluator")
    words += ["--max-restarts", str(job.max_restarts)]
    if job.min_workers is not None:
        words += ["--min-workers", str(job.min_workers)]
    words += ["--grace", str(job.grace)]
    return f"tfdist run --slurm {shlex.join(words)} \\\n  -- {shlex.join(job.command)}"


_SCRIPT = """\
#!/bin/bash
{directives}

# Each line below runs on the first node. tfdist starts itself on all of them with srun.{setup}

# scancel ends a job for good; Slurm itself queues it again when it preempts it, or a node fails.
cancelled=0
trap 'cancelled=1' TERM

{run} &
run=$!
wait $run; status=$?
while kill -0 $run 2>/dev/null; do wait $run; status=$?; done

# {again}: the training has saved before its time was over, and wants to go on.
restarts=${{SLURM_RESTART_COUNT:-0}}
if [ $cancelled = 0 ] && {{ [ $status = {preempted} ] || [ $status = {restart} ]; }}; then
  if [ "$restarts" -lt {max_requeues} ]; then
    echo "tfdist: queued again, $((restarts + 1)) of {max_requeues} times"
    scontrol requeue "$SLURM_JOB_ID" && sleep 60  # Slurm ends this script meanwhile
  else
    echo "tfdist: all {max_requeues} times that it may be queued again (max_requeues) are used up"
  fi
fi
exit $status
"""
