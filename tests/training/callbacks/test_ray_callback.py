"""Where ReportCallback cannot be created.

What it tells a real Ray: tests/environments/test_ray.py.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import tfdist_ext as tfd
from tfdist_ext.ray import ReportCallback


def test_outside_a_worker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_context() -> None:
        raise RuntimeError("not initialized")

    train: Any = SimpleNamespace(get_context=get_context)
    ray: Any = ModuleType("ray")
    ray.train = train
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.train", train)
    with pytest.raises(tfd.TrainingError, match="only be created in the function that a worker"):
        ReportCallback()


def test_without_ray_it_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(tfd.TrainingError, match=r"Install ray\[train\]"):
        ReportCallback()
