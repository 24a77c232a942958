"""The TF_CONFIG variable. One worker in it stays a cluster of one: somebody wrote it on purpose."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist_ext.cluster.config import ClusterConfig
from tfdist_ext.cluster.environments.reading import Environment


def look(env: Mapping[str, str]) -> ClusterConfig | str:
    """The cluster TF_CONFIG describes; unset, empty and white space only mean none."""
    text = env.get("TF_CONFIG")
    if text is None:
        return "TF_CONFIG is not set"
    if not text.strip():
        return "TF_CONFIG is empty"
    return ClusterConfig.from_tf_config(text)


TF_CONFIG = Environment("TF_CONFIG", ("TF_CONFIG",), look)
detect = TF_CONFIG.detect
