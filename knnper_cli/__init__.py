"""The commands and the Flower apps: the roof over `knnper`, which nothing imports."""
