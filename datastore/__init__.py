"""The local memory: store, kernel, interpolation, choice of λ."""
