"""The data sets of the benchmark LEAF, dealt to users as they are there."""
