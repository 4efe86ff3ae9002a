"""The Flower app: what ``flwr run`` starts, in a simulation and on machines."""
