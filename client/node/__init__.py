"""A real client on its own machine: Flower's SuperNode and a runner that forks.

This is where private parts of Flower's SuperNode are known (`flower_supernode`,
`flower_task`); everything else here is plain Python.
"""
