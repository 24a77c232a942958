"""Training under ParameterServerStrategy: a coordinator, workers, variables on servers."""
