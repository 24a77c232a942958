"""Files for schedulers, made from a description of a job: a batch script, manifests."""
