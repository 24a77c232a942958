"""tfd.distribute(...).fit, at its defaults."""

import sys

import keras
import work

import tfdist_ext as tfd

options = {"logical_cpus": 4} if sys.argv[1] == "mirrored" else {}
strategy = tfd.create_strategy(sys.argv[1], **options)
model = tfd.distribute(lambda: work.mlp(keras), strategy)
x, y = work.data()
work.report_speed(lambda n: model.fit(x, y, batch_size=work.GLOBAL_BATCH, epochs=n, verbose=0))
