"""tfdist check: is this task's cluster right, and are the other tasks there?"""

from __future__ import annotations

import argparse
import os
import sys

from tfdist_ext.cli.run import seconds_of
from tfdist_ext.cluster import ClusterConfig, describe_environments
from tfdist_ext.cluster.jobs import addresses_of
from tfdist_ext.cluster.liveness.preflight import WAIT, PreflightError, info_of, preflight
from tfdist_ext.launcher.resources import gpus_of

SUMMARY = "check the cluster of this task, and whether the other tasks answer"
USAGE = "check [options]"

EPILOG = """\
Run this on every task, with the environment of the job, while the job is not running: both use the
same ports. The exit status is 0 if all tasks are ready, or if there is no cluster; 1 if a task is
missing or does not match; and 2 if the description of the cluster is wrong.

example:
  srun tfdist check && srun python train.py"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tfdist check`."""
    wait = f"time to wait for the other tasks (default {WAIT:g})"
    parser.add_argument("--wait", type=seconds_of, default=WAIT, metavar="SECONDS", help=wait)


def run(options: argparse.Namespace, _: list[str]) -> int:
    """0 if all tasks are there and agree, or if there is no cluster; else 1."""
    cluster = ClusterConfig.from_env(os.environ)
    if cluster is None:
        print("no cluster in the environment: nothing to check")
        for name, text in describe_environments(os.environ):
            print(f"  {name}: {text}")
        return 0
    tasks = addresses_of(cluster.jobs)
    print(f"{cluster.task} of {len(tasks)} tasks, from {cluster.source}", flush=True)
    if str(cluster.task) not in tasks:
        print("an evaluator takes no part in the cluster; nothing to check")
        return 0
    info = info_of(str(cluster.task), cluster.jobs, len(gpus_of(os.environ)))
    try:
        preflight(info, wait=options.wait, source=cluster.source).close()
    except PreflightError as error:
        within = f" within {options.wait:g} s" if error.missing else ""
        print(f"tfdist check: {info.task}: {error}{within}", file=sys.stderr)
        return 1
    versions = ", ".join(f"{name} {version}" for name, version in info.versions.items())
    print(f"all {len(tasks)} tasks are ready, with the same cluster and {versions}")
    return 0
