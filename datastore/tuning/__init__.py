"""The choice of λ, k and σ on a client's own data."""
