"""The TF_CONFIG variable. One worker in it stays a cluster of one: somebody wrote it on purpose."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist_ext.cluster import tf_config
from tfdist_ext.cluster.environments.reading import Environment
from tfdist_ext.cluster.jobs import ClusterDescription


def parse(env: Mapping[str, str]) -> ClusterDescription | str:
    """The cluster TF_CONFIG describes; unset, empty and white space only mean none."""
    text = env.get("TF_CONFIG")
    if text is None:
        return "TF_CONFIG is not set"
    if not text.strip():
        return "TF_CONFIG is empty"
    return tf_config.parse(text, "TF_CONFIG")


TF_CONFIG = Environment("TF_CONFIG", ("TF_CONFIG",), parse)
