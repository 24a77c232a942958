"""Start a cluster on this machine, watch it, and end it: what `tfdist run` does.

    with local_plan(["python", "train.py"], workers=2, env=os.environ) as plan:
        result = run_plan(plan, Limits())

A plan has one command, one TF_CONFIG and one log file for each task; `run` runs it, and `restarts`
runs it again after failures. Nothing here imports TensorFlow.

`tfd.launch`, in `functions`, does the same for a function.
"""
