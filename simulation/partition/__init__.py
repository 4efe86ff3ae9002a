"""Central data sets split over virtual clients: seeded, hashed, always terminating."""
