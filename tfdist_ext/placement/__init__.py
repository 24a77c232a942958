"""Rules and plans that place the variables of a model. This package does not import TensorFlow.

    from tfdist_ext.placement import Sharded, Rule, VariableSpec, plan

    specs = [
        VariableSpec("users/embeddings", (50_000_000, 64), slots=2),
        VariableSpec("items/embeddings", (2_000_000, 64), slots=2),
        VariableSpec("head/kernel", (128, 1), slots=2),
    ]
    result = plan(specs, 4, rules=[Rule("items/.*", Sharded(2))], budget="12GiB")
    print(result)                            # bytes by task, imbalance, the largest variables
    result.shards_of("users/embeddings")     # (VariableShard(task=0, start=0, stop=12500000), ...)
    result.save_picture("plan.svg")

The planner splits large variables along axis 0 into even shards, so that all tasks hold about the
same number of bytes. If the plan is invalid, or the variables do not fit, `plan` raises a
PlacementError.
"""

from __future__ import annotations

from tfdist_ext.errors import PlacementError
from tfdist_ext.placement.placement_plan import PlacementPlan
from tfdist_ext.placement.planning import compare, plan
from tfdist_ext.placement.rules import (
    Balanced,
    Mirrored,
    OnDevice,
    OnTask,
    Owned,
    Placement,
    Rule,
    Sharded,
)
from tfdist_ext.placement.specs import Held, Place, VariableShard, VariableSpec

__all__ = [
    "Balanced",
    "Held",
    "Mirrored",
    "OnDevice",
    "OnTask",
    "Owned",
    "Place",
    "Placement",
    "PlacementError",
    "PlacementPlan",
    "Rule",
    "Sharded",
    "VariableShard",
    "VariableSpec",
    "compare",
    "plan",
]
