"""One epoch, execution by execution; all tasks of a cluster take the same turns.

Every execution is a collective, and so is every question below that is put to all workers. What
decides how many there are must therefore be the same on each task, and is agreed on where it may
not be: the chief alone runs callbacks that write, and a user's callback may stop one task.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import keras

from tfdist_ext.data.reading_errors import data_errors_as_raised
from tfdist_ext.training.epochs import Epoch
from tfdist_ext.training.interrupting import keeping_ctrl_c
from tfdist_ext.training.pace import Pace
from tfdist_ext.training.protocols import Engine, StepListener, StepProgram
from tfdist_ext.training.roles import looks_at_batches

__all__ = ["Loop"]


class Loop:
    """The turns of one `fit` or `evaluate`, its pace kept from epoch to epoch."""

    def __init__(
        self,
        model: keras.Model,
        engine: Engine,
        hooks: keras.callbacks.CallbackList,
        kind: str,
        listener: StepListener | None = None,
    ):
        """
        Args:
            kind: "train" or "test".
            listener: is told of finished steps.
        """
        self._listener = listener
        self._model = model
        self._reduction = engine.reduction
        self._begin = getattr(hooks, f"on_{kind}_batch_begin")
        self._end = getattr(hooks, f"on_{kind}_batch_end")
        self._stop_flag = "stop_training" if kind == "train" else "stop_evaluating"
        self._by_batch = self._reduction.any_worker(looks_at_batches(hooks.callbacks, kind))
        asked = model.steps_per_execution
        if asked > 1:
            self._pace = Pace(fixed=asked)
        else:
            fixed = 1 if self._by_batch else None
            self._pace = Pace(fixed=fixed, target=engine.seconds_per_execution)

    @property
    def _stopped(self) -> bool:
        return bool(getattr(self._model, self._stop_flag))

    def run(self, program: StepProgram, data: Epoch, where: str = "") -> tuple[dict[str, Any], int]:
        """(logs, steps done) of one epoch; `where` names it in messages, as "epoch 2, "."""
        with keeping_ctrl_c() as check_ctrl_c, data_errors_as_raised():
            return self._run(program, data, check_ctrl_c, where)

    def _run(
        self, program: StepProgram, data: Epoch, check_ctrl_c: Callable[[], None], where: str
    ) -> tuple[dict[str, Any], int]:
        peers = self._reduction.peers
        logs: dict[str, Any] = {}
        done, seconds = 0, 0.0
        with peers.meeting(f"{where}before its first step"):
            # Told to stop before the first batch, Keras still runs that one.
            one_only = self._reduction.any_worker(self._stopped)
            program.reset(resume=data.resumed)
        while data.steps is None or done < data.steps:
            left = None if data.steps is None else data.steps - done
            if self._listener is not None and (most := self._listener.max_steps()) is not None:
                left = most if left is None else min(left, most)
            n = self._pace.next(1 if one_only else left)
            self._begin(done)
            started = time.perf_counter()
            with peers.meeting(f"{where}steps after {done}"):
                result = program.run(
                    data.iterator,
                    n,
                    seconds=seconds,
                    known_length=data.known_length,
                    agreed=data.agreed,
                )
            seconds = time.perf_counter() - started
            check_ctrl_c()
            self._pace.took(result.chief_seconds)
            if result.steps == 0:
                logs = result.logs if data.resumed else logs
                break
            done += result.steps
            peers.reached(f"{where}step {done}")
            logs = result.logs
            data.advance(result.steps)
            if self._listener is not None:
                self._listener.steps_done(result.steps, logs, epoch_ends=done == data.steps)
            self._end(done - 1, logs)
            stop = self._stopped or one_only
            with peers.meeting(f"{where}stop after {done}?") if self._by_batch else nullcontext():
                stop = self._reduction.any_worker(stop) if self._by_batch else stop
            if stop:
                setattr(self._model, self._stop_flag, True)
                break
            if result.steps < n:
                break
        return logs, done
