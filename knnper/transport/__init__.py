"""How records travel: one codec, its carriers, one polling grid."""
