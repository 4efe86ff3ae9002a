"""``knnper federation``: credentials and registrations."""
