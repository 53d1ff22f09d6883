"""Which tokens belong together: the similarity graph, its threshold, its components, and their gradient."""
