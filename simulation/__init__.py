"""Virtual clients from a central data set: partitions, engines, experiments."""
