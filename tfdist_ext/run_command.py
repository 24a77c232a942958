"""tfdist run: a cluster on this machine, or on several, watched to its end."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import secrets
import shlex
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdist_ext.errors import LaunchError
from tfdist_ext.launch import LaunchPlan, addresses_needed, plan_local, reserve_ports, shell_line
from tfdist_ext.launch.command_line import COMMAND
from tfdist_ext.launch.exit_codes import (
    STALL_TIMEOUT,
    USUAL_STALL_TIMEOUT,
    RestartOn,
    stall_timeout,
)
from tfdist_ext.launch.isolation import enter_own_network
from tfdist_ext.launch.machines.agent import Node, run_node
from tfdist_ext.launch.machines.attached import Attachment
from tfdist_ext.launch.machines.hosts_file import read_hosts
from tfdist_ext.launch.machines.layout import Layout, parse_endpoint, parse_places
from tfdist_ext.launch.machines.leader import run_leader
from tfdist_ext.launch.machines.rendezvous import Endpoint
from tfdist_ext.launch.machines.slurm import Allocation, srun_command
from tfdist_ext.launch.machines.ssh import run_over_ssh
from tfdist_ext.launch.options import ports as ports_of
from tfdist_ext.launch.options import seconds as seconds_of
from tfdist_ext.launch.options import stop_signal
from tfdist_ext.launch.plan import found_command
from tfdist_ext.launch.restarting import Limits, run_with_restarts
from tfdist_ext.launch.restarts import RestartPolicy
from tfdist_ext.launch.shares import Share, gpus_of, shares_of
from tfdist_ext.launch.stop_signals import StopSignals

__all__ = ["EPILOG", "add_run_options", "run_run_command"]

EPILOG = """\
Each task runs the command with its own TF_CONFIG. The first task that fails is the root cause:
the others are ended, and its exit status is that of tfdist. With --ps, the run is over when the
chief is. Ctrl-C ends everything.

example:
  tfdist run --workers 2 -- python train.py --epochs 3

on three machines, each with its own R of 0, 1 and 2; HOST is the one with R = 0:
  tfdist run --nodes 3 --node-rank R --rendezvous HOST:29400 -- python train.py"""

# What the options of several machines are where the command line does not have them.
_NODES, _NODE_RANK = "TFDIST_NODES", "TFDIST_NODE_RANK"
_RENDEZVOUS, _TOKEN = "TFDIST_RENDEZVOUS", "TFDIST_RENDEZVOUS_TOKEN"


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tfdist run`."""
    tasks = parser.add_argument_group("tasks")
    number = functools.partial(tasks.add_argument, type=int, metavar="N")
    number("--workers", help="workers (default 1)")
    tasks.add_argument(
        "--process-per-device",
        action="store_true",
        help="a worker for each GPU, which it alone sees; without GPUs, --workers that divide the"
        " cores among them",
    )
    tasks.add_argument(
        "--chief",
        action=argparse.BooleanOptionalAction,
        help="a chief beside the workers (default: only with --ps, which needs one)",
    )
    number("--ps", default=0, help="parameter servers")
    tasks.add_argument("--evaluator", action="store_true", help="an evaluator")
    number("--data-workers", default=0, help="workers of a tf.data service, and its dispatcher")
    _add_machines(parser)
    run = parser.add_argument_group("run")
    seconds = functools.partial(run.add_argument, type=seconds_of, metavar="SECONDS")
    run.add_argument("--log-dir", type=Path, metavar="DIR", help="keep a log file a task here")
    run.add_argument(
        "--ports",
        type=ports_of,
        metavar="LOW-HIGH",
        help="the ports that tasks may listen on, twice as many as a machine has tasks (default:"
        " any from 10000 that the system does not hand out itself)",
    )
    to_kill = "from SIGTERM to SIGKILL when a preemption ends the tasks (default 30; Ctrl-C: 5)"
    seconds("--grace", default=30.0, help=to_kill)
    run.add_argument(
        "--preemption-signal",
        type=stop_signal,
        default=signal.SIGTERM,
        metavar="SIGNAL",
        help="one that asks the training to save and end, beside SIGTERM (SIGUSR1 on Slurm)",
    )
    seconds(
        "--stall-timeout",
        help="end a task whose training makes no progress for this time (default 60; longer while"
        " it compiles, in callbacks, and where steps take long; 0: never)",
    )
    to_end = "with --ps: time for the others to end after the chief (default 5)"
    seconds("--linger", default=5.0, help=to_end)
    seconds("--timeout", help="end the run after this time (124)")
    run.add_argument(
        "--isolate",
        action="store_true",
        help="in a network of its own: no one outside of this run reaches its tasks, and they reach"
        " no one (Linux, one machine)",
    )
    again = parser.add_argument_group("restarts")
    again.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="start the cluster again when a task fails, so often (default 0);"
        " fit(checkpoint_dir=...) goes on from its newest checkpoint",
    )
    again.add_argument(
        "--min-workers",
        type=int,
        metavar="N",
        help="go on without a worker that fails again and again, with at least so many",
    )
    again.add_argument(
        "--restart-on",
        type=RestartOn.parse,
        default=RestartOn(),
        metavar="CODES",
        help="the ends that are worth it (default exception,128-255; 128 + n is signal n, and an"
        " exception in the same place as before is not)",
    )
    seconds = functools.partial(again.add_argument, type=seconds_of, metavar="SECONDS")
    to_grow = "with fewer workers: try all again after this time, and twice as long each time"
    seconds("--grow-after", default=600.0, help=f"{to_grow} (default 600)")
    run.add_argument(
        "--raw",
        action="store_true",
        help="show and keep all that tasks write, also what TensorFlow writes at every start",
    )
    run.add_argument(
        "--dry-run", action="store_true", help="print a line for the shell a task; start nothing"
    )


def _add_machines(parser: argparse.ArgumentParser) -> None:
    machines = parser.add_argument_group("several machines")
    of_node = machines.add_argument
    of_node("--nodes", type=int, metavar="N", help=f"machines, each with its tfdist ({_NODES})")
    of_node("--node-rank", type=int, metavar="R", help=f"this one's, from 0 ({_NODE_RANK})")
    of_node(
        "--rendezvous",
        metavar="HOST:PORT",
        help=f"where node 0 listens, and the others reach it ({_RENDEZVOUS});"
        f" a token in {_TOKEN}, the same on all machines, keeps others out",
    )
    of_node("--workers-per-node", type=int, metavar="N", help="workers of each machine (default 1)")
    of_node(
        "--place",
        action="append",
        default=[],
        metavar="JOB=NODES",
        help="the machines of other tasks, as ps=1,2 (default: --ps take turns, the chief is on"
        " node 0, the evaluator on the last one)",
    )
    of_node(
        "--hosts",
        metavar="FILE",
        help="start tfdist on all machines of this TOML file, from here, by ssh",
    )
    of_node(
        "--slurm",
        action="store_true",
        help="on all nodes of this Slurm job: --nodes, --node-rank and --rendezvous are its own,"
        " --workers-per-node its --ntasks-per-node, --preemption-signal SIGUSR1",
    )
    ssh = "the program, with its options (default ssh), as 'ssh -F my_config'"
    of_node("--ssh", default="ssh", metavar="COMMAND", help=ssh)
    # How tfdist starts another one at the other end of ssh; see `attached`.
    of_node("--attached", action="store_true", help=argparse.SUPPRESS)
    host = "a name or address of this one for the others (default: that it reaches node 0 from)"
    of_node("--node-address", default="", metavar="HOST", help=host)
    of_node(
        "--rendezvous-timeout",
        type=seconds_of,
        default=300.0,
        metavar="SECONDS",
        help="for all machines to come (default 300)",
    )


@dataclass(frozen=True)
class _Run:
    """What the options say.

    Attributes:
        command: the words after `--`.
        env: what the tasks' environment starts from.
        layout: which tasks run on which machine.
        shares: what each worker of this machine gets of it; empty: they share it.
        policy: when it starts again.
        limits: how it is ended.
    """

    options: argparse.Namespace
    command: Sequence[str]
    env: Mapping[str, str]
    layout: Layout
    shares: Sequence[Share]
    policy: RestartPolicy
    limits: Limits


def run_run_command(options: argparse.Namespace, command: list[str]) -> int:
    """The exit status of the run."""
    # The environment is read here, and handed down.
    given = dict(os.environ)
    if options.isolate and (options.hosts or options.slurm or options.nodes or given.get(_NODES)):
        raise LaunchError(
            "--isolate must come without --nodes, --hosts and --slurm, as machines reach each other"
            " by a network; leave it out, and close the ports to others by a firewall"
        )
    if options.hosts is not None:
        return _on_hosts(options, command)
    if options.slurm:
        allocation = Allocation.of_environment(given)
        if allocation.node is None:
            return _on_slurm(options, command, allocation)
        options.nodes, options.node_rank = allocation.nodes, allocation.node
        options.rendezvous = allocation.rendezvous
    machines = (_NODES, _NODE_RANK, _RENDEZVOUS, _TOKEN)
    env = {name: value for name, value in given.items() if name not in machines}
    env.setdefault(COMMAND, shlex.join(["tfdist", *sys.argv[1:]]))
    if options.stall_timeout is not None:
        env[STALL_TIMEOUT] = f"{options.stall_timeout:g}"
    env.setdefault(STALL_TIMEOUT, f"{USUAL_STALL_TIMEOUT:g}")
    nodes = _number(options.nodes, given, _NODES)
    several = nodes is not None
    _check_machines(options, several)
    per_node = options.workers_per_node if several else options.workers
    shares = _shares(options, env, per_node) if options.process_per_device else []
    layout = Layout(
        nodes=1 if nodes is None else nodes,
        workers_per_node=len(shares) or (1 if per_node is None else per_node),
        chief=options.chief,
        ps=options.ps,
        evaluator=options.evaluator,
        data_workers=options.data_workers,
        places=parse_places(options.place),
    )
    policy = RestartPolicy(
        options.max_restarts,
        layout.workers,
        layout.workers if options.min_workers is None else options.min_workers,
        options.restart_on,
        options.grow_after,
    )
    limits = Limits(
        options.grace,
        options.linger,
        options.timeout,
        stall_timeout(env),
        options.preemption_signal,
        options.raw,
        say_started=True,
    )
    run = _Run(options, command, env, layout, shares, policy, limits)
    if options.dry_run:
        _show(run)
        return 0
    if options.isolate:
        enter_own_network()
    # Logs are always written, and deleted where no one will read them.
    log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="tfdist-"))
    status = 1
    try:
        several = layout.nodes > 1 or options.attached or options.slurm
        status = _on_machines(run, log_dir, given) if several else _on_one(run, log_dir)
    finally:
        if options.log_dir is None and status == 0:
            shutil.rmtree(log_dir, ignore_errors=True)
    if status:
        host = options.node_address or (socket.gethostname() if options.slurm else "")
        where = f"{host}:{log_dir}" if options.attached or options.slurm else log_dir
        print(f"tfdist: logs: {where}", file=sys.stderr)
    return status


def _on_hosts(options: argparse.Namespace, command: Sequence[str]) -> int:
    hosts, port = read_hosts(options.hosts)
    for option, value in (("--nodes", options.nodes), ("--rendezvous", options.rendezvous)):
        if value is not None:
            raise LaunchError(f"{option} must come without --hosts, which says it; leave one out")
    if not command:
        found_command(command, {})  # an error
    words = _without(options.words, ("--hosts", "--ssh"))
    return run_over_ssh(
        hosts,
        port,
        [*words, "--", *command],
        ssh=shlex.split(options.ssh),
        restarts=options.max_restarts > 0,
        stop=StopSignals(options.preemption_signal),
    )


def _on_slurm(options: argparse.Namespace, command: Sequence[str], allocation: Allocation) -> int:
    """Become the srun that starts this command on each node."""
    given = (options.nodes, options.node_rank, options.rendezvous, options.workers)
    if any(value is not None for value in given):
        raise LaunchError(
            "--slurm must come without --nodes, --node-rank, --rendezvous and --workers, which are"
            " those of the job; leave them out, and write --workers-per-node"
        )
    words = list(options.words)
    if options.workers_per_node is None and not options.process_per_device:
        words += ["--workers-per-node", str(allocation.tasks_per_node or 1)]
    if options.preemption_signal == signal.SIGTERM:
        words += ["--preemption-signal", "SIGUSR1"]
    found_command(command, os.environ)
    line = srun_command(allocation.nodes, [*words, "--", *command])
    if options.dry_run:
        print(shlex.join(line))
        return 0
    if shutil.which(line[0]) is None:
        raise LaunchError("--slurm must find srun on PATH, got none; start it where Slurm is")
    sys.stdout.flush()
    # Seen by root and this user alone, who may do what it allows anyway.
    os.execvpe(line[0], line, {**os.environ, _TOKEN: secrets.token_urlsafe(24)})


def _without(words: Sequence[str], options: Sequence[str]) -> list[str]:
    """The words behind `run`, without some options and their values."""
    left, it = [], iter(words[1:])
    for word in it:
        if word in options:
            next(it, None)
        elif word.partition("=")[0] not in options:
            left.append(word)
    return left


def _on_one(run: _Run, log_dir: Path) -> int:
    return run_with_restarts(
        functools.partial(_planned, run),
        run.policy,
        log_dir=log_dir,
        env=run.env,
        limits=run.limits,
    )


@contextlib.contextmanager
def _planned(run: _Run, numbers: Sequence[int], log_dir: Path | None) -> Iterator[LaunchPlan]:
    layout = run.layout
    tasks = {name: getattr(layout, name) for name in ("chief", "ps", "evaluator", "data_workers")}
    tasks["workers"] = len(numbers)
    theirs = [run.shares[number] for number in numbers] if run.shares else []
    with reserve_ports(addresses_needed(**tasks), among=run.options.ports) as ports:
        yield plan_local(
            run.command, **tasks, shares=theirs, ports=ports, env=run.env, log_dir=log_dir
        )


def _on_machines(run: _Run, log_dir: Path, given: Mapping[str, str]) -> int:
    options, layout = run.options, run.layout
    rank = _number(options.node_rank, given, _NODE_RANK)
    where = options.rendezvous or given.get(_RENDEZVOUS, "")
    if rank is None or not where:
        raise LaunchError(
            f"--nodes {layout.nodes} must come with --node-rank and --rendezvous HOST:PORT, got"
            f" {'no --node-rank' if rank is None else 'no --rendezvous'}; give each machine its own"
            " --node-rank, from 0, and all the same --rendezvous, at node 0"
        )
    if not 0 <= rank < layout.nodes:
        raise LaunchError(f"--node-rank must be from 0 to {layout.nodes - 1}, got {rank}")
    host, port = parse_endpoint(where)
    attachment = Attachment() if options.attached else None
    token = given.get(_TOKEN, "") if attachment is None else attachment.token
    endpoint = Endpoint(host, port, token, options.rendezvous_timeout)
    stop = StopSignals(run.limits.preemption_signal)
    if attachment is not None:
        attachment.pass_on(stop)
    command = found_command(run.command, run.env)
    if rank == 0:
        return run_leader(
            layout,
            command,
            run.shares,
            options.ports,
            endpoint,
            run.policy,
            log_dir=log_dir,
            env=run.env,
            limits=run.limits,
            stop=stop,
        )
    again = run.policy.max_restarts > 0
    # Where the output of all machines comes to one place, node 0 alone speaks for all.
    speaks = attachment is None and not options.slurm
    node = Node(
        rank,
        options.node_address,
        command,
        run.shares,
        options.ports,
        log_dir,
        run.env,
        again,
        speaks,
    )
    return run_node(node, endpoint, layout.described, run.limits, stop)


def _check_machines(options: argparse.Namespace, several: bool) -> None:
    if several and options.workers is not None:
        raise LaunchError(
            f"--nodes must come with --workers-per-node, got --workers {options.workers}; write"
            " --workers-per-node"
        )
    if several:
        return
    alone = {"--workers-per-node": options.workers_per_node, "--node-rank": options.node_rank}
    alone |= {"--rendezvous": options.rendezvous, "--place": options.place or None}
    for option, value in alone.items():
        if value is not None:
            raise LaunchError(f"{option} must come with --nodes, got none; add --nodes 2 or more")


def _number(option: int | None, given: Mapping[str, str], variable: str) -> int | None:
    text = given.get(variable, "").strip()
    if option is not None or not text:
        return option
    if not text.isdecimal():
        raise LaunchError(f"{variable} must be a number from 0, got {text!r}")
    return int(text)


def _show(run: _Run) -> None:
    """What would be started."""
    if run.layout.nodes == 1:
        with _planned(run, range(run.layout.workers), run.options.log_dir) as plan:
            for task in plan.tasks:
                print(shell_line(task))
        return
    tasks: dict[int, list[str]] = {}
    for job, nodes in run.layout.nodes_of(range(run.layout.workers)).items():
        for index, node in enumerate(nodes):
            tasks.setdefault(node, []).append(f"{job}:{index}")
    for node in range(run.layout.nodes):
        print(f"node {node}: {' '.join(tasks.get(node, ['no tasks']))}")


def _shares(options: argparse.Namespace, env: Mapping[str, str], count: int | None) -> list[Share]:
    if options.ps or options.chief or options.evaluator:
        raise LaunchError(
            "--process-per-device must come with workers alone, got --ps, --chief or --evaluator;"
            " leave one of them out"
        )
    bound = hasattr(os, "sched_getaffinity")  # not on macOS
    cores = sorted(os.sched_getaffinity(0)) if bound else []
    return shares_of(count, gpus=gpus_of(env), cores=cores)
