"""The command line and the Flower apps, on top of all packages: nothing imports it."""
