"""Secure aggregation: the server learns the sum of a round's updates, and no update.

Two protocols, as state machines without any network:

- SecAgg+ (Bell, Bonawitz, Gascón, Lepoint, Raykova, CCS 2020, "Secure Single-Server
  Aggregation with (Poly)Logarithmic Overhead", Algorithm 2), with the stages and the
  double masking of Bonawitz et al. 2017, "Practical Secure Aggregation", Figure 4.
- ``pairwise``: only the masks of pairs of clients, with one key agreement for many
  rounds. Every client of a round must reply.

The server is semi-honest: it follows the protocol and looks at all that it receives. No
client's key is signed, so a server that hands out keys of its own learns all. A client
does refuse requests that a correct server never makes; see `knnper.secure.client`.

Cryptography comes from two libraries, and none of it is written here: ``cryptography``
(X25519, HKDF, AES-CTR, ChaCha20-Poly1305) and ``pycryptodome`` (Shamir's secret
sharing). Flower's public module ``flwr.common.secure_aggregation`` wraps the same two
libraries. It is not used: its secret sharing pads a key to twice its length, which
doubles the time, and its quantisation draws from NumPy's global generator, so a run
could not be repeated.
"""
