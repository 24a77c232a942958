"""In the place of matplotlib in jobs of tests, as importing it takes half a second."""

raise ImportError("matplotlib is left out of this job")
