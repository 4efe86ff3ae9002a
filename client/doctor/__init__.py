"""What can be wrong with a client, looked at without disturbing its node."""
