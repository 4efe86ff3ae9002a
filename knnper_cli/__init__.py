"""The commands and the Flower apps: the roof over `knnper`, which nothing imports."""

import knnper  # noqa: F401 (tells Flower to report nothing, before it is imported)
