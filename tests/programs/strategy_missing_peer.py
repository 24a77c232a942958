"""Waits for a peer that does not come; reports after half a second instead of ten.

strategy_missing_peer.py NAME SECONDS_TO_WAIT
"""

import sys

import tfdist_ext as tfd
from tfdist_ext.cluster import liveness

liveness.FIRST_AFTER = 0.5
tfd.create_strategy(sys.argv[1], wait=float(sys.argv[2]))
