"""Start a cluster on this machine, watch it, and end it: what `tfdist run` does.

    with local_plan(["python", "train.py"], workers=2, env=os.environ) as plan:
        result = run_plan(plan)

A plan has one command, one TF_CONFIG and one log file for each task; `run` runs it, and `restarts`
runs it again after failures. Nothing here imports TensorFlow.

`tfd.launch` is the function of `functions`. Import other names from their modules, for example
`from tfdist_ext.launch.run import run_plan`.
"""
