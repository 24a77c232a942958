"""Waits for a peer that does not come; reports after half a second instead of ten."""

import sys

import tfdist_ext as tfd
from tfdist_ext.strategies import waiting

waiting.FIRST_AFTER = 0.5
tfd.create_strategy(sys.argv[1])
