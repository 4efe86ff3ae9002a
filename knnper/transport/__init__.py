"""How records travel: one codec, two carriers, one polling grid."""
