"""What can be wrong with a server, looked at without disturbing it."""
