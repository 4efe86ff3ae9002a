"""Central data sets dealt to virtual clients: seeded, hashed, always terminating."""
